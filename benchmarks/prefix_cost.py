"""What `prefix` at many lengths costs, against the usual script: one pass a length with all its logits.

    python benchmarks/prefix_cost.py CHECKPOINT TEXT [--lengths 1024,2048,4096,8192]

Each way runs in a process of its own; prints seconds (loading not counted) and peak resident memory of each,
with one pass at the longest length alone for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("ours", "usual", "longest")


def measure(way: str, source: str, text: str, lengths: list[int]) -> dict[str, float]:
    """Seconds, GiB and the perplexity at the longest length, of one way."""
    import torch

    import pe_study

    model, tokenizer = pe_study.load_causal_lm(source)
    ids = tokenizer(Path(text).read_text(encoding="utf-8")[: 12 * max(lengths)])["input_ids"]
    began = time.perf_counter()
    if way == "ours":
        frame = pe_study.evaluate_perplexity([ids], lengths=lengths, protocol="prefix", model=model)
        rows = frame[frame["length"] == max(lengths)]
        nll = rows["nll_sum"].sum() / rows["num_tokens"].sum()
    else:
        for length in lengths if way == "usual" else [max(lengths)]:
            window = torch.tensor([ids[: length + 1]])
            with torch.inference_mode():
                logits = model(window[:, :-1]).logits
            nll = float(torch.nn.functional.cross_entropy(logits[0].float(), window[0, 1:]))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": seconds, "peak_gib": peak, "perplexity": math.exp(nll)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("text")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.way:
        print(json.dumps(measure(options.way, options.source, options.text, lengths)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, options.source, options.text, "--lengths", options.lengths]
        output = subprocess.run([*command, "--way", way], check=True, capture_output=True, text=True).stdout
        found[way] = json.loads(output.splitlines()[-1])
        print(way, {name: round(value, 3) for name, value in found[way].items()}, flush=True)
    for other in ("usual", "longest"):
        ratios = {name: found["ours"][name] / found[other][name] for name in ("seconds", "peak_gib")}
        print(f"ours / {other}:", {name: round(value, 3) for name, value in ratios.items()})


if __name__ == "__main__":
    main()
