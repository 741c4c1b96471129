"""How long a report takes, and how much memory: a synthetic study of N rows, read and drawn in a new process.

    python benchmarks/report_rows.py [--rows 200000] [--profile]

The study: seven encodings, RoPE under three rescales, three seeds, three protocols, nine lengths, as many
documents as N asks for. Prints rows, seconds (imports included) and peak resident memory of the largest
process. On 2 cores of an x86-64 machine with nothing else running (Python 3.11, pandas 3.1, matplotlib 3.11):
200,220 rows in 18.0 s, 0.44 GiB, with two processes that draw.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
SEEDS, PROTOCOLS = (0, 1, 2), ("nonoverlapping", "sliding", "exact-context")


def write(rows: int, folder: Path) -> tuple[Path, int]:
    """A study of about `rows` rows below `folder`: its path, and how many they are."""
    sys.path.insert(0, str(TESTS))
    import synthetic_studies as synthetic

    one = len(synthetic.rows(seeds=(0,), protocols=PROTOCOLS, num_documents=1))
    documents = max(1, round(rows / one / len(SEEDS)))
    frame = synthetic.rows(seeds=SEEDS, protocols=PROTOCOLS, num_documents=documents)
    return synthetic.write_study(folder, frame), len(frame)


def measure(study: str, output: str, profile: bool) -> dict[str, float]:
    """Seconds and GiB of this process, which does nothing else."""
    began = time.perf_counter()
    from pe_study import report

    with cProfile.Profile() as profiler:
        if not profile:
            profiler.disable()
        report.build([study], output)
    seconds = time.perf_counter() - began
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    own, children = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    assert "torch" not in sys.modules
    return {"seconds": seconds, "peak_gib": max(own, children) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--profile", action="store_true", help="where the time goes, on stderr")
    parser.add_argument("--study", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.study:
        print(json.dumps(measure(options.study, f"{options.study}-report", options.profile)))
        return
    with tempfile.TemporaryDirectory() as folder:
        study, rows = write(options.rows, Path(folder))
        command = [sys.executable, __file__, "--study", str(study)] + ["--profile"] * options.profile
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(f"{rows:,} rows: {found['seconds']:.1f} s, peak {found['peak_gib']:.2f} GiB")


if __name__ == "__main__":
    main()
