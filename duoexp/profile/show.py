"""A profile as a table."""

from rich.table import Table

from duoexp.profile.tables import PASSES, PREFILLS, Profile, Timing

NAMES = {"target": "target pass", "draft": "draft pass", "message": "message round trip"}


def table(profile: Profile) -> Table:
    """A line for each kind of pass at each context, a column a width; milliseconds, medians."""
    timings = list(profile.timings.values())
    widths = sorted({each.width for each in timings if each.side in PASSES})
    found = Table(title="ms, by tokens of a target pass and by sequences of a draft pass", title_justify="left")
    for name in ("context", "", *(str(width) for width in widths)):
        found.add_column(name, justify="left" if name == "" else "right")
    for context in sorted({each.context for each in timings}):
        for side, beside in ((side, beside) for side in PASSES for beside in (False, True)):
            times = {each.width: each for each in timings if each.place[:3] == (side, beside, context)}
            if times:
                what = f"{NAMES[side]}, {'beside the other' if beside else 'alone'}"
                found.add_row(str(context), what, *(_ms(times.get(width)) for width in widths))
        for side in ("message", *PREFILLS):
            if (side, False, context, 1) in profile.timings:
                what = NAMES.get(side, side.replace("_", " "))
                found.add_row(str(context), what, _ms(profile.timings[side, False, context, 1]))
        found.add_section()
    return found


def _ms(timing: Timing | None) -> str:
    if timing is None:
        return ""
    return f"{1000 * timing.median_s:.1f}" if timing.median_s > 1e-3 else f"{1000 * timing.median_s:.2f}"
