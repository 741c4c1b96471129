"""What `prefix` at many lengths costs, against the usual script: one pass a length with all its logits.

    python benchmarks/prefix_cost.py CHECKPOINT TEXT [--lengths 1024,2048,4096,8192] [--output FILE.json]

Each way runs in a process of its own; prints seconds, seconds of all threads, and peak resident memory of
each (loading not counted), with one pass at the longest length alone for comparison, and ours at twice that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("ours", "usual", "longest")
COSTS = ("seconds", "cpu_seconds", "peak_gib")


def measure(way: str, source: str, text: str, lengths: list[int]) -> dict[str, float]:
    """Seconds, GiB and the perplexity at the longest length, of one way."""
    import torch

    import pe_study
    from pe_study.memory import peak_memory_bytes, reset_peak_memory

    model, tokenizer = pe_study.load_causal_lm(source)
    ids = tokenizer(Path(text).read_text(encoding="utf-8")[: 12 * max(lengths)])["input_ids"]
    reset_peak_memory(model.device)
    began, worked = time.perf_counter(), time.process_time()
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
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    peak = peak_memory_bytes(model.device) / 2**30
    return {**spent, "peak_gib": peak, "perplexity": math.exp(nll)}


def measure_alone(way: str, source: str, text: str, lengths: list[int]) -> dict[str, float]:
    """`measure` in a process of its own."""
    joined = ",".join(map(str, lengths))
    command = [sys.executable, __file__, source, text, "--lengths", joined, "--way", way]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "python": platform.python_version(), "cpus": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("text")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--way", choices=WAYS, help="measure this one here and print it as JSON")
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.way:
        print(json.dumps(measure(options.way, options.source, options.text, lengths)))
        return
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        found[way] = measure_alone(way, options.source, options.text, lengths)
        print(way, {name: round(value, 3) for name, value in found[way].items()}, flush=True)
    found["ours at twice the longest"] = measure_alone(
        "ours", options.source, options.text, [2 * max(lengths)]
    )
    print("peak at twice the longest:", round(found["ours at twice the longest"]["peak_gib"], 3))
    ratios = {}
    for other in ("usual", "longest"):
        ratio = {name: round(found["ours"][name] / found[other][name], 3) for name in COSTS}
        ratios[f"ours / {other}"] = ratio
        print(f"ours / {other}:", ratio)
    if options.output:
        facts = {"lengths": lengths, "measured": found, "ratios": ratios, "machine": machine()}
        options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
