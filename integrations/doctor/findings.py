"""What an examination finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        name: its name, which stays the same between versions; docs/doctor.md lists all.
        severity: ``"error"`` if the training computes something else than is meant or will fail, ``"warning"`` if it
            loses accuracy, memory or time.
        where: the parameters, groups or objects concerned.
        what: what is the case.
        stake: what it costs: a share of the updates, bytes, or the loss.
        remedy: what to do about it.
    """

    name: str
    severity: Literal["error", "warning"]
    where: str
    what: str
    stake: str
    remedy: str

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.severity}: {self.name}",
                f"  where   {self.where}",
                f"  what    {self.what}",
                f"  stake   {self.stake}",
                f"  remedy  {self.remedy}",
            ]
        )


@dataclass(frozen=True)
class Diagnosis:
    """The findings of an examination, errors first.

    Attributes:
        examined: what was examined, in words.
        findings: what is wrong.
    """

    examined: str
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def names(self) -> list[str]:
        """The names of the findings."""
        return [finding.name for finding in self.findings]

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis for JSON."""
        return {"examined": self.examined, "findings": [asdict(finding) for finding in self.findings]}

    @property
    def headline(self) -> str:
        """What was examined, and the number of findings."""
        count = len(self.findings)
        return f"{self.examined}: {f'{count} finding' + 's' * (count > 1) if count else 'no findings'}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings)])


def in_order(examined: str, findings: Sequence[Finding]) -> Diagnosis:
    """A diagnosis with errors first, in the order in which they were found."""
    return Diagnosis(examined, tuple(sorted(findings, key=lambda finding: finding.severity != "error")))


def some(names: Sequence[str], what: str = "parameter") -> str:
    """Names in words, at most three of them: ``"5 parameters: a, b, c, ..."``."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} {what}{'s' * (len(names) != 1)}: {shown}"


def in_bytes(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
