#!/usr/bin/env python3
"""A text file in, JSON lines out: one prompt a line, answered in batches. The shortest example of use on a GPU host.

scripts/generate_file.py prompts.txt answers.jsonl --model smollm2-135m --max-tokens 64 --device gpu
"""

import argparse
import json
import sys
from pathlib import Path

import jaxrt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="a text file, one prompt a line")
    parser.add_argument("answers", type=Path, help="where the JSON lines go")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", help='"cpu", "gpu", "gpu:1"; JAX\'s default if left out')
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="prompts answered at a time")
    options = parser.parse_args()

    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    params = jaxrt.SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    with (
        jaxrt.load(options.model, device=options.device) as runtime,
        options.answers.open("w", encoding="utf-8") as out,
    ):
        for start in range(0, len(prompts), options.rows):
            batch = prompts[start : start + options.rows]
            for prompt, answer in zip(batch, runtime.generate(batch, params), strict=True):
                line = {"prompt": prompt, "text": answer.text, "finish_reason": answer.finish_reason}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            print(f"{min(start + options.rows, len(prompts))} of {len(prompts)}", file=sys.stderr)


if __name__ == "__main__":
    main()
