"""From a resolved recipe to a trainer on a runtime: workers, their launch, and what joins them."""
