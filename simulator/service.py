"""The cost model as autoscaling asks for it: seconds of a prompt and of a decode step. Knows StepCost; knows no load."""

from dataclasses import dataclass

from shoal.simulator.step_cost import StepCost, StepWork


@dataclass(frozen=True, slots=True)
class CostService:
    """Formulas 1 and 2 of docs/planning.md, for the workers of both pools."""

    prefill: StepCost
    decode: StepCost
    token_budget: int  # of one step: prompts are cut by it
    source: str = "profile"
    steps_hold_prompts: bool = False

    def prefill_s(self, num_tokens: float) -> float:
        return self.prefill.prefill_s(round(num_tokens), chunk_tokens=self.token_budget)

    def step_s(self, num_rows: int, pairs_per_row: float = 0.0) -> float:
        return self.decode.step_s(StepWork(num_rows=num_rows, num_kv_layer_tokens=num_rows * pairs_per_row))
