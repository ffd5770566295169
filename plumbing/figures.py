"""Figures as SVG files, which any browser shows. They are drawn from results.json and the stages' logs alone."""
import json
from html import escape
from pathlib import Path

from plumbing import checkpoint

CURVES = ("loss", "valid_r1", "valid_valid", "valid_kl", "valid_tokens_per_nfe", "reward", "reward_rank",
          "reward_format", "reward_invalid", "valid", "tokens_per_nfe", "entropy", "kl_to_start", "clipped",
          "copy_rate_target_first", "copy_rate_target_later", "dropped_groups")     # of the logs, to be drawn
SWEEPS = {"output_len": "tokens", "candidates": "candidates", "prompt_len": "cached", "batch": "batch",
          "block_len": "block_len"}                                 # of the results: name, and the key of its x axis
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700", "#57606a")


def label(x, y, words, anchor="middle"):
    """A line of text at (x, y)."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'


def span(values):
    """(least, greatest), which are never equal."""
    least, greatest = min(values), max(values)
    return least, greatest if greatest > least else least + 1


def draw(path, title, x_name, y_name, series):
    """Write lines through points as a small SVG. series: {name: [(x, y), ...]}."""
    xs, ys = zip(*(p for points in series.values() for p in points))
    (x0, x1), (y0, y1) = span(xs), span(ys)
    parts = [label(310, 25, title), label(310, 375, x_name), label(70, 40, y_name), label(70, 350, f"{x0:.4g}"),
             label(550, 350, f"{x1:.4g}"), label(62, 334, f"{y0:.4g}", "end"), label(62, 54, f"{y1:.4g}", "end"),
             '<path d="M70 50 V330 H550" fill="none" stroke="black"/>']
    for i, (name, points) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        placed = [(70 + 480 * (x - x0) / (x1 - x0), 330 - 280 * (y - y0) / (y1 - y0)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed)
        parts += [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>',
                  f'<g fill="{color}">{label(545, 70 + 18 * i, name, "end")}{dots}</g>']
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 390" font-family="sans-serif" '
                    'font-size="13"><rect width="600" height="390" fill="white"/>' + "".join(parts) + "</svg>\n",
                    encoding="utf-8")


def draw_all(folder, results):
    """Draw the frontier, the sweeps, and the curves of the stages' logs, as SVG files beside results.json."""
    if found := results.get("frontier"):
        draw(folder / "frontier.svg", "R@1 against speed-up over AR (batch 1)", "speed-up", "R@1",
             {mode: [(r["speedup"], r["r1"]) for r in found if r["mode"] == mode] for mode in ("ar", "diffusion")})
    for name, key in SWEEPS.items():
        if rows := results.get("sweeps", {}).get(name):
            draw(folder / f"sweep_{name}.svg", f"speed-up at tau 0.9 by {name}", key, "speed-up",
                 {"diffusion": [(r[key], r["speedup"]) for r in rows]})
    for name in checkpoint.NAMES:
        if (log := folder / f"{name}.jsonl").exists():
            draw_log(folder, name, read_log(log))


def read_log(path):
    """The lines of a JSONL log as dicts. A line that cannot be read, such as half a line after a kill, is skipped."""
    found = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def by_step(lines, key):
    """The values of one key of a log: sorted (step, value). Of a step that a resumed run told twice, the later one."""
    return sorted({line["step"]: line[key] for line in lines if key in line}.items())


def draw_log(folder, name, lines):
    """Draw the curves of one stage: how RL's rollouts failed, and each of CURVES that has two points or more."""
    told = by_step(lines, "failures")
    if kinds := sorted({kind for _, failures in told for kind in failures}):
        draw(folder / f"{name}_failures.svg", f"{name}: invalid rollouts", "step", "rollouts",
             {kind: [(step, failures.get(kind, 0)) for step, failures in told] for kind in kinds})
    for key in CURVES:
        if len(points := by_step(lines, key)) > 1:
            draw(folder / f"{name}_{key}.svg", f"{name}: {key}", "step", key, {name: points})
