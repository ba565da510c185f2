"""The answer of `thinwire what-if` as a picture: a bar a method, its warm-up apart, and how far off it may be."""

from __future__ import annotations

from html import escape

from thinwire.cli.quantities import bytes_text
from thinwire.contract.plan import hours
from thinwire.contract.what_if import Answer, Outcome

WIDE, LEFT, RIGHT, TOP, ROW = 960, 130, 660, 66, 34
STYLE = """<style>
 .page{fill:#fff}.dense{fill:#d9822b}.bits{fill:#1f4e79}.bar{stroke:#17212b}text{fill:#17212b}.note{fill:#556270}
 @media (prefers-color-scheme: dark){.page{fill:#10161d}.bits{fill:#5b9bd5}.bar{stroke:#e8eef4}text{fill:#e8eef4}
 .note{fill:#9aa7b4}}
</style>"""


def picture(found: Answer) -> str:
    """An SVG of its own, in light and dark."""
    high = TOP + ROW * len(found.outcomes) + 34
    longest_s = max(one.high_s for one in found.outcomes)
    title = f"{found.model} on {found.nodes} x {found.gpus} {found.device}, {bytes_text(found.bytes_per_s)}/s a link"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<title id="t">{escape(title)}</title>',
        '<desc id="d">The time of the whole run by method; steps in full precision and later ones apart.</desc>',
        STYLE,
        f'<rect class="page" width="{WIDE}" height="{high}"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
        f'<text class="note" x="10" y="44" font-size="12">{found.steps} steps of {found.global_batch} samples: time of '
        "the run; orange: in full precision; line: from - to, by how far steps were from predicted ones</text>",
    ]
    for number, one in enumerate(found.outcomes):
        lines += _row(one, TOP + ROW * number, (RIGHT - LEFT) / longest_s)
    return "\n".join([*lines, "</svg>", ""])


def _row(one: Outcome, top: int, per_s: float) -> list[str]:
    middle = top + 10
    full_s = one.run_s if one.name.startswith("dense") else one.warmup * (one.dense_step_s or 0.0)
    full = min(full_s, one.run_s) * per_s
    low, high = LEFT + one.low_s * per_s, LEFT + one.high_s * per_s
    words = f"{hours(one.run_s)}, {one.speedup:.2f}x, {bytes_text(one.box_bytes)} a step"
    if one.cost is not None:
        words += f", {one.cost:,.0f}"
    return [
        f'<text x="10" y="{middle + 5}">{escape(one.title)}</text>',
        f'<rect class="dense" x="{LEFT}" y="{top}" width="{full:.1f}" height="20"/>',
        f'<rect class="bits" x="{LEFT + full:.1f}" y="{top}" width="{one.run_s * per_s - full:.1f}" height="20"/>',
        f'<line class="bar" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{RIGHT + 10}" y="{middle + 5}">{escape(words)}</text>',
    ]
