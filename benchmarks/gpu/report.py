"""One measured figure beside what was aimed at, and the table of them. Measures nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """`is_met` is None where there is no aim, or where a CPU stood in for the GPU. `must`: the check fails without it."""

    what: str
    value: str
    aim: str = ""
    is_met: bool | None = None
    must: bool = False

    def __str__(self) -> str:
        verdict = {None: "", True: "  ok", False: "  MISSED"}[self.is_met]
        aim = f"  (aim {self.aim})" if self.aim else ""
        return f"{self.what}: {self.value}{aim}{verdict}"


def show(lines: list[Line]) -> None:
    """The table, in Markdown."""
    print("\n| what | measured | aim | |\n|---|---|---|---|")
    for line in lines:
        verdict = {None: "", True: "ok", False: "missed"}[line.is_met]
        print(f"| {line.what} | {line.value} | {line.aim} | {verdict} |")
