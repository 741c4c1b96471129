"""What diagnostics by position cost: time and memory of a forward pass with them, over those of one without.

    python benchmarks/diagnostics_cost.py CHECKPOINT TEXT [--length 16384] [--rounds 2] [--output FILE.json]

Each way runs in a process of its own, in turns; prints the best seconds and the peak resident memory of each
(loading not counted), and their ratios. The bar at length 16384 on SmolLM2-135M is 1.6 and 1.3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("plain", "diagnostics")


def measure(way: str, source: str, text: str, length: int, step: str) -> dict[str, float]:
    """Seconds and GiB of one pass over the first `length` tokens of a text."""
    import torch

    import pe_study
    from pe_study.evaluators import diagnostics
    from pe_study.kernels.statistics import Bins
    from pe_study.memory import peak_memory_bytes, reset_peak_memory

    model, tokenizer = pe_study.load_causal_lm(source)
    ids = tokenizer(Path(text).read_text(encoding="utf-8")[: 12 * length])["input_ids"][:length]
    assert len(ids) == length, f"{text} has {len(ids)} tokens"
    reset_peak_memory(model.device)
    began = time.perf_counter()
    if way == "plain":
        with torch.inference_mode():
            model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
    else:
        every = diagnostics.step_of(step if step == "auto" else int(step), length)
        trained = min(2048, length // 2)
        diagnostics.collect(model, [ids], Bins(length, trained, every))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_gib": peak_memory_bytes(model.device) / 2**30}


def measure_alone(way: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, options.source, options.text, "--length", str(options.length)]
    command += ["--step", options.step, "--way", way]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("text")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--step", default="auto", help="every how manieth query; auto as in a plan")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--way", choices=WAYS, help="measure this one here and print it as JSON")
    options = parser.parse_args()
    if options.way:
        found = measure(options.way, options.source, options.text, options.length, options.step)
        print(json.dumps(found))
        return
    rounds = [{way: measure_alone(way, options) for way in WAYS} for _ in range(options.rounds)]
    for name in ("seconds", "peak_gib"):
        plain, ours = (min(each[way][name] for each in rounds) for way in WAYS)
        print(f"{name:9} plain {plain:8.2f}  diagnostics {ours:8.2f}  ratio {ours / plain:.2f}")
    if options.output:
        facts = {"length": options.length, "step": options.step, "rounds": rounds}
        options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
