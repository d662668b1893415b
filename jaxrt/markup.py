"""Escaped, self-contained HTML strings for notebooks: answers, tables and trees of weights.

No scripts and no style sheet: only inline styles, `currentColor` and translucent backgrounds, so that light and dark
themes both work and nothing reaches outside its own output. Every text goes through `_text`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrt.requests import Generation, TokenLogprobs

Leaf = tuple[str, tuple[int, ...], str, int]  # dotted path, shape, dtype, bytes

# Shades of a token by its probability: at least this much, how the legend says it, opacity of the background.
SHADES = (
    (0.9, "≥ 90 %", 0.0),
    (0.5, "≥ 50 %", 0.14),
    (0.1, "≥ 10 %", 0.30),
    (0.01, "≥ 1 %", 0.48),
    (0.0, "less", 0.70),
)
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}  # shown as pictures
_BOX = "font-size:0.95em;line-height:1.5;max-width:60em"
_FAINT = "opacity:0.6"
_RULE = "1px solid rgba(128,128,128,0.35)"
_MONO = "font-family:ui-monospace,monospace"
_SHORT = 60  # characters of a sample that its closed summary shows


def generation_html(generation: "Generation") -> str:
    """An answer: prompt tokens faint and closed, new tokens shaded by how unlikely they were, and the statistics.

    Tokens are shaded, with their probabilities as tooltips, only where `generation.logprobs` is there. The other
    samples of `n` follow, closed.
    """
    prompt = " ".join(map(str, generation.prompt_tokens))
    parts = [
        f'<details style="{_FAINT}"><summary>prompt: {len(generation.prompt_tokens):,} tokens</summary>'
        f'<div style="{_MONO}">{_text(prompt)}</div></details>',
        _answer(generation),
    ]
    for number, sample in enumerate(generation.samples[1:], start=2):
        shown = sample.text[:_SHORT] + ("…" if len(sample.text) > _SHORT else "")
        parts.append(
            f'<details><summary><span style="{_FAINT}">sample {number}:</span> {_text(shown)}</summary>'
            f"{_answer(sample)}</details>"
        )
    if generation.logprobs is not None:
        parts.append(_legend())
    stats = [
        *generation.stats.lines(),
        ("finished by", _finish(generation)),
        ("seed", str(generation.seed)),
    ]
    facts = " · ".join(f"{_text(name)}: {_text(value)}" for name, value in stats)
    parts.append(f'<div style="{_FAINT};border-top:{_RULE};margin-top:0.5em;font-size:0.85em">{facts}</div>')
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def table_html(headers: Sequence[object], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A table of `str(cell)`; numbers stand on the right. `caption` stands above, where there is one."""
    head = "".join(f'<th style="text-align:left;border-bottom:{_RULE}">{_text(str(name))}</th>' for name in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    above = (
        f'<caption style="text-align:left;white-space:nowrap;{_FAINT}">{_text(caption)}</caption>' if caption else ""
    )
    inner = f"{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="{_BOX};border-collapse:collapse">{inner}</table>'


def weights_html(title: str, facts: Mapping[str, str], leaves: Sequence[Leaf]) -> str:
    """A model: its facts, and its arrays as a tree that opens. Leaves are (dotted path, shape, dtype, bytes).

    Numbered neighbours with the same arrays inside (the layers of a model) are shown once, as `layers.0 … layers.29`.
    """
    root = _tree(leaves)
    listed = " · ".join(f"{_text(name)}: {_text(value)}" for name, value in facts.items())
    return (
        f'<div style="{_BOX}"><div><b>{_text(title)}</b></div><div style="{_FAINT};font-size:0.9em">{listed}</div>'
        f"<details open><summary>weights{_size(root)}</summary>{_inside(root)}</details></div>"
    )


def bytes_text(count: int) -> str:
    """A number of bytes for people, in powers of 1,000: `98.4 MB`."""
    power = min(max(math.floor(math.log10(count)) // 3, 0), 5) if count > 0 else 0
    return f"{count} B" if power == 0 else f"{count / 1_000**power:.1f} {' kMGTP'[power]}B"


def _text(text: str) -> str:
    return escape(text.translate(_CONTROLS), quote=True)


def _cell(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td style="text-align:{"right" if number else "left"}">{_text(str(value))}</td>'


# An answer


def _answer(generation: "Generation") -> str:
    if generation.logprobs is not None and len(generation.logprobs) == len(generation.pieces):
        inner = "".join(map(_token, generation.pieces, generation.logprobs))
    else:
        inner = _text(generation.text)
    # dir=auto keeps text that runs from right to left, or says it does, within its own box
    return f'<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;margin:0.4em 0">{inner}</div>'


def _token(piece: str, entry: "TokenLogprobs") -> str:
    lines = [f"token {entry.token}: {_chance(entry.logprob)}, rank {entry.rank:,}"]
    lines += [f"{'→' if token == entry.token else ' '} {token}: {_chance(value)}" for token, value in entry.top.items()]
    title = f'title="{_text(chr(10).join(lines))}"'
    if not piece:  # a special token, or part of a character that a later token completes
        return f'<span {title} style="{_FAINT};font-size:0.75em;user-select:none">⟨{entry.token}⟩</span>'
    return f'<span {title} style="{_shade(entry.logprob)}">{_text(piece)}</span>'


def _chance(logprob: float) -> str:
    return f"logprob {logprob:.4f} ({math.exp(logprob):.2%})"


def _shade(logprob: float) -> str:
    probability = math.exp(logprob)
    # not `>=` alone: a NaN belongs to no shade and is drawn as the least likely
    opacity = next((opacity for least, _, opacity in SHADES if probability >= least), SHADES[-1][2])
    return f"background:rgba(230,110,30,{opacity});border-radius:2px"


def _legend() -> str:
    keys = "".join(
        f'<span style="background:rgba(230,110,30,{opacity});border:{_RULE};border-radius:2px;padding:0 0.4em;'
        f'margin-right:0.3em">{_text(label)}</span>'
        for _, label, opacity in SHADES
    )
    return f'<div style="font-size:0.8em"><span style="{_FAINT}">probability of each token: </span>{keys}</div>'


def _finish(generation: "Generation") -> str:
    reason = generation.stop_reason
    return str(generation.finish_reason) + ("" if reason is None else f" ({reason!r})")


# A tree of weights


@dataclass
class _Node:
    """One step of a dotted path: an array, or what lies under it, or both (a matrix and its scales)."""

    leaf: Leaf | None = None
    children: dict[str, "_Node"] = field(default_factory=dict)

    def leaves(self) -> Iterator[Leaf]:
        if self.leaf is not None:
            yield self.leaf
        for child in self.children.values():
            yield from child.leaves()

    def signature(self) -> tuple[object, ...]:
        """Equal for nodes that hold the same arrays under the same names."""
        return (
            self.leaf and self.leaf[1:],
            tuple((name, child.signature()) for name, child in self.children.items()),
        )


def _tree(leaves: Sequence[Leaf]) -> _Node:
    root = _Node()
    for leaf in leaves:
        node = root
        for name in leaf[0].split("."):
            node = node.children.setdefault(name, _Node())
        node.leaf = leaf
    return root


def _inside(node: _Node, path: str = "") -> str:
    """The children of `node` as a list, equal numbered neighbours as one."""
    runs = groupby(enumerate(node.children.items()), key=_kin)
    items = "".join(_branch(path, [item for _, item in run]) for _, run in runs)
    return f'<ul style="list-style:none;margin:0;padding-left:1.4em">{items}</ul>'


def _kin(placed: tuple[int, tuple[str, _Node]]) -> tuple[object, ...]:
    """Equal for neighbours of consecutive numbers that hold the same arrays; a name has no kin."""
    position, (name, node) = placed
    return (int(name) - position, node.signature()) if name.isdecimal() else (name,)


def _branch(path: str, run: list[tuple[str, _Node]]) -> str:
    (first, node), last = run[0], run[-1][0]
    label = first if len(run) == 1 else f"{path}{first} … {path}{last}"
    if not node.children:
        return f"<li>{_line(label, node, len(run))}</li>"
    own = f'<span style="{_FAINT}">in each of {len(run)}:</span>' if len(run) > 1 else ""
    own += _line("itself", node, 1) if node.leaf is not None else ""
    own = f'<div style="padding-left:1.4em">{own}</div>' if own else ""
    return (
        f"<li><details><summary>{_name(label)}{_size(*(child for _, child in run))}</summary>"
        f"{own}{_inside(node, f'{path}{first}.')}</details></li>"
    )


def _line(label: str, node: _Node, count: int) -> str:
    assert node.leaf is not None  # a path that ends here
    _, shape, dtype, nbytes = node.leaf
    extents = " × ".join(f"{extent:,}" for extent in shape) or "scalar"
    each = f" each, {bytes_text(count * nbytes)}" if count > 1 else ""
    return (
        f"<div>{_name(label)} {_text(extents)} "
        f'<span style="{_FAINT}">{_text(dtype)}, {bytes_text(nbytes)}{each}</span></div>'
    )


def _name(label: str) -> str:
    return f'<span style="{_MONO}">{_text(label)}</span>'


def _size(*nodes: _Node) -> str:
    leaves = [leaf for node in nodes for leaf in node.leaves()]
    numbers = sum(math.prod(shape) for _, shape, _, _ in leaves)
    total = bytes_text(sum(nbytes for *_, nbytes in leaves))
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves):,} arrays"
    return f' <span style="{_FAINT}">{arrays}, {numbers:,} numbers, {total}</span>'
