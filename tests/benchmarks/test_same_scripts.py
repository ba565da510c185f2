"""The table of the same scripts: pairs by seed, judged by the study's rule."""

from benchmarks.same_scripts import METHODS, table


def runs(worse_by):
    """Three seeds of one script; worse_by: of each method that is not DDP, a share of the loss."""
    return [
        {
            "script": "plain loop",
            "method": method,
            "seed": seed,
            "loss": (2 + seed) * (1 + by),
            "sent_bytes": 100 * by + 10,
        }
        for seed in range(3)
        for method, by in zip(METHODS, (0.0, *worse_by), strict=True)
    ]


def test_differences_are_paired_by_seed_and_judged():
    _, _, ddp, adam, onebit = table(runs((-0.001, 0.05)))
    assert ddp == "| plain loop | ddp | 3.0000 | 2.0000 to 4.0000 |  |  | 10.0 | 1.000 |"
    assert "-0.10 % (-0.10 to -0.10) | same |" in adam
    assert "+5.00 % (+5.00 to +5.00) | worse |" in onebit
