"""The output of ``halfstep plan``: a table of parts, one of messages, and sentences about work, card and fit."""

from __future__ import annotations

from typing import Any

from halfstep.cli.plan_options import OF_A_PLAN
from halfstep.cli.terminal import Table, text
from halfstep.numerics.messages import count
from halfstep.numerics.planning.sharding import BUSES

_PHASES = {"always": "always", "backward": "fwd, bwd", "step": "step"}
STATES = {"master", "remainder", "exp_avg", "exp_avg_sq", "momentum_buffer"}


def digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def size(value: int) -> str:
    """Bytes in the largest binary unit in which the number is at least 1, with three digits or more."""
    unit, name = unit_of(value)
    return f"{digits(value / unit)} {name}" if unit > 1 else f"{value} B"


def unit_of(value: int, largest: int = 40) -> tuple[int, str]:
    """The largest binary unit in which `value` is at least 1, of at most ``2**largest`` bytes, and its name."""
    units = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
    return next((2**power, name) for power, name in units if power <= largest and (value >= 2**power or not power))


def _milliseconds(amount: float, rate: float) -> str:
    return f"{digits(1e3 * amount / rate)} ms"


def _several(count: int) -> str:
    return f"{count:,}" if count > 1 else ""


def headline(plan: dict[str, Any]) -> str:
    settings, total, active = plan["settings"], plan["parameters"], plan["active_parameters"]
    groups = f", groups of {settings['shard']}" if settings["shard"] else ""
    gpus = f"{settings['gpus']} GPU{'s' * (settings['gpus'] > 1)}"
    placed = gpus if settings["strategy"] == "single" else f"{settings['strategy']}{groups} on {gpus}"
    counted = f"{total:,} parameters" + (f", {active:,} active" if active < total else "")
    batch = f"; batch {settings['batch']}, {settings['seq']:,} tokens" if settings["batch"] and settings["seq"] else ""
    return f"{counted}; {plan['layout']['name']} ({plan['layout']['bytes_per_parameter']:.4g} B each); {placed}{batch}"


def part_rows(plan: dict[str, Any]) -> list[list[str]]:
    """Name, bytes per parameter, divisor, bytes, phase and note of each part."""
    rows = []
    for part in plan["parts"]:
        each = "" if part["per_parameter"] is None else f"{part['per_parameter']:.4g}"
        amount = ("" if part["exact"] else "≈ ") + size(part["bytes"])
        phase = _PHASES[part["phase"]] if part["place"] == "gpu" else "on the host"
        rows.append([part["name"], each, _several(part["divisor"]), amount, phase, part["note"]])
    return rows


def message_rows(plan: dict[str, Any]) -> list[list[str]]:
    """Data, operation, ranks and bytes of each message."""
    messages = plan["communication"]
    return [[sent["what"], sent["name"], _several(sent["ranks"]), size(sent["bytes"])] for sent in messages]


def _tables(plan: dict[str, Any]) -> list[Any]:
    totals, messages = plan["totals"], message_rows(plan)
    rows: list[Any] = [*part_rows(plan), ()]
    for name, key, note, bold in (
        ("always", "state", "weights, gradients, states, buckets", "strong"),
        ("and in fwd, bwd", "backward", "", ""),
        ("and in the step", "step", "", ""),
        ("peak", "peak", "always, and the larger of the two", "strong"),
        ("on the host", "host", "for this GPU", ""),
    ):
        if key == "state" or (totals[key] and (key != "peak" or totals["backward"] or totals["step"])):
            rows.append((text(name, bold), "", "", text(size(totals[key]), bold), "", note))
    shown: list[Any] = [Table(("part", "B/param", "÷", "per GPU", "when", ""), rows, {1, 2, 3}, ruled=True, wraps=5)]
    if messages:
        header = ("what", "operation", "GPUs", "in all")
        shown += ["", text("Sent by each GPU in a step", "strong"), "", Table(header, messages, {2, 3}, ruled=True)]
    return shown


def verdict(plan: dict[str, Any]) -> str:
    """Whether a plan fits its card, in one sentence."""
    gpu, peak, host = plan["card"], size(plan["totals"]["peak"]), plan["totals"]["host"]
    if gpu is None:
        return f"{peak} per GPU at the peak. --card, such as --card 24GiB, tells whether that fits, and what does."
    named = gpu["name"] if gpu["name"][:1].isdigit() else f"{gpu['name']} ({size(gpu['memory'])})"  # 24 GiB is a name
    gpus = plan["settings"]["gpus"]
    peak += f" on each of {gpus:,} GPUs" if gpus > 1 else ""
    fits, left = ("Fits", "left of") if gpu["fits"] else ("Does not fit", "more than")
    than = f"{size(abs(gpu['left']))} {left} the {size(gpu['usable'])} after the reserve"
    hosted = f"; {size(host)} of the host's memory per GPU" if host else ""
    return f"{fits} {named}: {peak} at the peak, {than}{hosted}."


def _verdict(content: dict[str, Any]) -> list[Any]:
    """The verdict, the plan in a line and, if it does not fit, the smallest changes with which it does."""
    (plan,) = content["plans"]
    fits = plan["card"]["fits"] if plan["card"] else None
    shown: list[Any] = [text(verdict(plan), {True: "good", False: "bad", None: "strong"}[fits]), headline(plan), ""]
    if content["ways"]:
        shown.append("It fits with any one of these, the smallest change first:")
        for solution in content["ways"]:
            shown += ["", text(f"  {typed(solution['options'])}  ({size(solution['peak'])})", "strong")]
            shown.append(Table((), [("  ", cost) for cost in solution["costs"]], wraps=1))
        shown.append("")
    elif fits is False:
        shown += ["No four changes make it fit, not even with 64 GPUs.", ""]
    return shown


def typed(options: dict[str, str | None]) -> str:
    """Options as on the command line; those to leave out are named so."""
    named = {OF_A_PLAN[name].also or name: value for name, value in options.items()}
    words = [f"--{name} {value}".rstrip() for name, value in named.items() if value is not None]
    return " ".join([*words, *(f"(without --{name})" for name, value in named.items() if value is None)])


def comparison(content: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and rows of the table that compares layouts or strategies."""
    plans, layouts = content["plans"], content["compare"] == "layouts"
    unit, name = unit_of(max(plan["totals"]["peak"] for plan in plans), 30)
    carded, hosted = plans[0]["card"], any(plan["totals"]["host"] for plan in plans)
    header = ["layout" if layouts else "strategy", *["B/param"] * layouts, "weights", "gradients"]
    header += ["states", *["always"] * (not layouts), "peak", "sent", *["host"] * hosted, *["fits"] * bool(carded)]
    rows = []
    for plan in plans:
        totals, by_name = plan["totals"], {part["name"]: part for part in plan["parts"]}
        states = by_name.keys() & STATES
        per_parameter = sum(by_name[part]["per_parameter"] or 0 for part in ("weights", "gradients", *states))
        sizes = [sum(by_name[part]["bytes"] for part in parts) for parts in (["weights"], ["gradients"], states)]
        sizes += [*[totals["state"]] * (not layouts), totals["peak"], plan["bytes_sent"], *[totals["host"]] * hosted]
        cells = [digits(size / unit) if size else "0" for size in sizes]
        fits = ["yes" if plan["card"]["fits"] else "no"] if carded else []
        rows.append([plan["label"], *[f"{per_parameter:.4g}"] * layouts, *cells, *fits])
    settings = plans[0]["settings"]
    gpus = f"{settings['gpus']:,} GPU{'s' * (settings['gpus'] > 1)}"
    shared = settings["strategy"] if layouts else plans[0]["layout"]["name"]
    placed = gpus if shared == "single" else f"{shared} on {gpus}"
    return f"{plans[0]['parameters']:,} parameters; {placed}; per GPU, {name}", header, rows


def shown(content: dict[str, Any]) -> list[Any]:
    """The content of ``--json`` as tables and sentences."""
    if content["compare"] is not None:
        title, header, rows = comparison(content)
        right = range(1, len(header) - (header[-1] == "fits"))
        return [text(title, "strong"), "", Table(header, rows, right, ruled=True)]
    (plan,) = content["plans"]
    return [*_verdict(content), *_tables(plan), "", *sentences(content)]


def sentences(content: dict[str, Any]) -> list[str]:
    """FLOPs, what crosses the bus, and what the step moves; with a card of known speed their times too."""
    (plan,) = content["plans"]
    work, gpu, offloaded, lines = plan["work"], plan["card"], plan["settings"]["offload"], []
    timed = gpu is not None and gpu["bandwidth"] is not None
    if work is not None:
        again = work["hardware"] - work["training"]
        recomputed = f", and {count(again, 'FLOP')} recomputed for checkpointing" if again else ""
        total = ("" if work["exact"] else "≈ ") + count(work["training"], "FLOP")
        lines.append(f"Work of a step: {total} per GPU{recomputed}.")
    crossing = sum(sent["bytes"] for sent in plan["communication"] if sent["name"].startswith("copy "))
    if crossing:
        times = " and ".join(f"{_milliseconds(crossing, rate)} at {rate // 10**9} GB/s" for _, rate in BUSES)
        lines.append(f"{size(crossing)} cross the bus: {times}, as over PCIe 4.0 and 5.0 with 16 lanes.")
    step = ", in the host's memory" if offloaded and gpu is not None else ""
    if timed and not offloaded:
        step = f": {_milliseconds(plan['step_traffic'], gpu['bandwidth'])} at {gpu['bandwidth'] / 1e12:g} TB/s"
    lines.append(f"The optimizer's step moves at least {size(plan['step_traffic'])}{step}.")
    if timed and work is not None:
        peak = f"At {gpu['flops'] / 1e12:g} TFLOP/s, the {gpu['name']}'s dense 16-bit peak"
        lines.append(f"{peak}, the work takes {_milliseconds(work['hardware'], gpu['flops'])}.")
    if plan["settings"]["model"] is None:
        lines.append("Activations and gathered units are not included: they are unknown without a shape.")
    return lines
