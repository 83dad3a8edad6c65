"""The tool server of `adding`, which the library starts as a program."""

import verifiers.v1 as vf


def add(expression):
    return str(sum(map(int, expression.split("+"))))


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, expression: str) -> str:
        """The sum of some numbers."""
        try:
            return add(expression)
        except ValueError as error:
            return f"error: {error}"


if __name__ == "__main__":
    Calculator.run()
