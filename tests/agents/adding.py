"""A task set of verifiers with a tool, for tests; it exports its class by __all__, as the library wants."""

import verifiers.v1 as vf
from adding_tools import Calculator, add

SUMS = (
    *("8176+5421=", "96344+37686=", "64023+11876=", "90712+41886="),
    *("33871+82345=", "12093+77121=", "51234+98765=", "70081+80409="),
)
OTHERS = (
    ("break", "no judge"),
    ("stop", "an end of the task's own"),
    ("system", "another message of the system"),
    ([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}], "a prompt of two messages"),
)


class AddData(vf.TaskData):
    answer: str


class AddTask(vf.Task[AddData]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        if task.prompt == "break":
            raise ValueError("the judge broke")
        return float(trace.last_reply.lstrip("=") == task.answer)

    @vf.metric
    async def replies(self, trace):
        return float(trace.num_turns)

    @vf.stop
    async def said_enough(self, trace: vf.Trace) -> bool:
        return self.data.prompt == "stop" and trace.num_turns >= 1


class AddTasks(vf.Taskset[AddTask]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self):
        sums = [(text, add(text.strip("="))) for text in SUMS]
        for prompt, answer in (*sums, *OTHERS):
            system = "be brief" if prompt == "system" else None
            yield AddTask(AddData(prompt=prompt, answer=answer, system_prompt=system), self.config.task)


__all__ = ["AddTasks"]
