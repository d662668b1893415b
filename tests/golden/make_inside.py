"""Makes inside-smollm2.json: the inside of SmolLM2-135M as transformers computes it in float32 on the demo model's
file.

Needs torch and transformers, which jaxrt does not: python make_inside.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TOKENS = [504, 3575, 282, 4649, 314, 260]  # "The capital of France is the"
NEXT = [7042, 30, 1077]
WIDE, VOCAB = 24, 600  # every 24th of the width, every 600th logit: enough to see any layer go wrong
REMOVED = {5: [0, 3], 12: [7]}  # heads by layer


def rounded(tensor: torch.Tensor) -> list:
    return json.loads(json.dumps(tensor.tolist()), parse_float=lambda text: float(f"{float(text):.7g}"))


def main(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]), output_hidden_states=True, output_attentions=True, use_cache=True)
        steps, past = [], out.past_key_values
        for token in NEXT:
            step = model(
                torch.tensor([[token]]),
                past_key_values=past,
                output_hidden_states=True,
                output_attentions=True,
                use_cache=True,
            )
            past = step.past_key_values
            steps.append(step)

        def without(module: torch.nn.Module, args: tuple, heads: list[int]) -> tuple:
            x = args[0].clone()
            for head in heads:
                x[..., head * 64 : (head + 1) * 64] = 0
            return (x, *args[1:])

        for layer, heads in REMOVED.items():
            model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
                lambda module, args, heads=heads: without(module, args, heads)
            )
        ablated = model(torch.tensor([TOKENS]))
    # hidden_states: embeddings, then the stream after each layer but the last; its last entry is the final norm
    wide = slice(None, None, WIDE)
    golden = {
        "tokens": TOKENS,
        "next": NEXT,
        "wide": WIDE,
        "vocab": VOCAB,
        "removed": {str(layer): heads for layer, heads in REMOVED.items()},
        "hidden": [rounded(state[0, :, wide]) for state in out.hidden_states],
        "hidden_max": [float(state.abs().max()) for state in out.hidden_states],
        "attentions": [rounded(weights[0]) for weights in out.attentions],
        "logits": rounded(out.logits[0, :, ::VOCAB]),
        "logits_max": float(out.logits.abs().max()),
        "decode_hidden": [rounded(torch.cat([s.hidden_states[i][0, :, wide] for s in steps])) for i in range(31)],
        "decode_attention": [rounded(weights[0, :, 0]) for weights in steps[-1].attentions],
        "decode_logits": rounded(torch.cat([step.logits[0, :, ::VOCAB] for step in steps])),
        "ablated_logits": rounded(ablated.logits[0, :, ::VOCAB]),
    }
    target = Path(__file__).with_name("inside-smollm2.json")
    target.write_text(json.dumps(golden, separators=(",", ":")))
    print(target, target.stat().st_size)


main(Path(sys.argv[1]))
