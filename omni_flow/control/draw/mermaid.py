"""A graph as Mermaid text, for READMEs and issues: one subgraph per role, dashed back edges, joins on the edges."""

from __future__ import annotations

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.draw.boxes import Box, picture


def mermaid(graph: CompiledGraph) -> str:
    """The graph as a Mermaid flowchart."""
    drawn = picture(graph.spec)
    names = {box.id: f"n{index}" for index, box in enumerate(drawn.boxes)}
    lines = ["flowchart LR"]
    lines += [f"    {names[b.id]}([{_quoted(b.title, b.subtitle)}])" for b in drawn.boxes if b.kind == "placeholder"]
    boxes = {box.id: box for box in drawn.boxes if box.kind == "interface"}
    for index, role in enumerate(graph.spec.roles):
        own = [boxes[i.name] for i in graph.spec.interfaces if i.role == role.name and i.name in boxes]
        if own:
            lines.append(f"    subgraph r{index}[{_quoted(role.name, own[0].subtitle)}]")
            lines += [f"        {names[box.id]}[{_quoted(_short(box), box.note)}]" for box in own]
            lines.append("    end")
    lines += [f"    {names[b.id]}([{_quoted(b.title)}])" for b in drawn.boxes if b.kind == "output"]
    for edge in drawn.edges:
        arrow = "-.->" if edge.back else "==>" if edge.stream else "-->"
        words = [edge.out, edge.label]
        label = ": ".join(word for word in words if word)
        text = f"|{_quoted(label)}|" if label else ""
        lines.append(f"    {names[edge.source]} {arrow}{text} {names[edge.target]}")
    return "\n".join(lines) + "\n"


def _short(box: Box) -> str:
    use, slash, rest = box.title.rpartition("/")
    return f"{use}{slash}{rest.partition('.')[2]}"


def _quoted(*words: str) -> str:
    text = "<br/>".join(word.replace("&", "&amp;").replace('"', "&quot;") for word in words if word)
    return f'"{text}"'
