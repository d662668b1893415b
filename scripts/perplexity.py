#!/usr/bin/env python3
"""Perplexity of a model in each way of holding its weights and its cache, on one text: what a way costs in quality.

    scripts/perplexity.py --model FILE [--text FILE] [--tokens 4096] [--window 1024] [--json]

The text is cut into windows, each scored by itself from its first token on. The first way is the one compared with.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

import jaxrt

WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "as the file has it": {"quantize": "keep"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "float32, cache bfloat16": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "float32, cache int8": {"dtype": "float32", "kv_dtype": "int8"},
    "as the file has it, cache int8": {"quantize": "keep", "kv_dtype": "int8"},
}


def measure(model: str, text: str, tokens: int, window: int, options: dict[str, str]) -> dict[str, Any]:
    with jaxrt.load(model, **options) as rt:  # type: ignore[arg-type]
        ids = list(rt.tokenizer.encode(text))[:tokens]
        windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        scored = [score for ids in windows if len(ids) > 1 for score in rt.score([list(ids)])]
        nll = -np.concatenate([np.array(score.logprobs[1:], np.float64) for score in scored])
        greedy = np.concatenate([np.array(score.greedy[1:]) for score in scored])
    return {"tokens": len(nll), "perplexity": math.exp(nll.mean()), "greedy": float(greedy.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, help="UTF-8; jaxrt's own documents if left out")
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--window", type=int, default=1_024)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(__file__).parent.parent
    files = [options.text] if options.text else [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n\n".join(path.read_text() for path in files)
    found = {name: measure(options.model, text, options.tokens, options.window, way) for name, way in WAYS.items()}
    if options.json:
        print(json.dumps(found))
        return
    first = next(iter(found.values()))["perplexity"]
    print("| weights and cache | perplexity | against the first |\n|---|---:|---:|")
    for name, each in found.items():
        print(f"| {name} | {each['perplexity']:.4f} | {each['perplexity'] / first - 1:+.2%} |")
    print(f"\n{options.model}, {next(iter(found.values()))['tokens']:,} tokens in windows of {options.window:,}")


if __name__ == "__main__":
    main()
