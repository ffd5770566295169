"""Figures as SVG files, which any browser shows: from results.json and the stages' logs alone."""
import json

import checkpoint

CURVES = ("loss", "valid_r1", "valid_valid", "valid_kl", "valid_tokens_per_nfe", "reward", "reward_rank", "reward_format",
          "reward_invalid", "valid", "tokens_per_nfe", "entropy", "kl_to_start", "clipped", "copy_rate_target_first",
          "copy_rate_target_later", "dropped_groups")               # of the logs, to be drawn


def draw(path, title, x_name, y_name, series):
    """Lines through points as a small SVG, which any browser shows. series: {name: [(x, y), ...]}."""
    xs, ys = zip(*(p for points in series.values() for p in points))
    (x0, x1), (y0, y1) = ((min(v), max(v) if max(v) > min(v) else min(v) + 1) for v in (xs, ys))
    at = lambda x, y: (70 + 480 * (x - x0) / (x1 - x0), 330 - 280 * (y - y0) / (y1 - y0))
    text = lambda x, y, words, anchor="middle": f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'
    parts = [text(310, 25, title), text(310, 375, x_name), text(70, 40, y_name), text(70, 350, f"{x0:.4g}"),
             text(550, 350, f"{x1:.4g}"), text(62, 334, f"{y0:.4g}", "end"), text(62, 54, f"{y1:.4g}", "end"),
             '<path d="M70 50 V330 H550" fill="none" stroke="black"/>']
    for i, (name, points) in enumerate(series.items()):
        color = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700", "#57606a")[i % 6]
        line = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in points)
        parts += [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>',
                  f'<g fill="{color}">' + text(545, 70 + 18 * i, name, "end") + "".join(
                      '<circle cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(*at(*p)) for p in points) + "</g>"]
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 390" font-family="sans-serif" '
                    'font-size="13"><rect width="600" height="390" fill="white"/>' + "".join(parts) + "</svg>\n")


def draw_all(folder, results):
    """The frontier, the sweeps, and the curves of the stages' logs, as SVG files beside results.json."""
    if found := results.get("frontier"):
        draw(folder / "frontier.svg", "R@1 against speed-up over AR (batch 1)", "speed-up", "R@1",
             {mode: [(r["speedup"], r["r1"]) for r in found if r["mode"] == mode] for mode in ("ar", "diffusion")})
    for name, key in (("output_len", "tokens"), ("candidates", "candidates"), ("prompt_len", "cached"), ("batch", "batch"),
                      ("block_len", "block_len")):
        if rows := results.get("sweeps", {}).get(name):
            draw(folder / f"sweep_{name}.svg", f"speed-up at tau 0.9 by {name}", key, "speed-up",
                 {"diffusion": [(r[key], r["speedup"]) for r in rows]})
    for name in checkpoint.NAMES:
        if (log := folder / f"{name}.jsonl").exists():
            lines = [json.loads(line) for line in log.read_text().splitlines()]

            def by_step(key):                                       # a resumed run says some steps twice
                return sorted({x["step"]: x[key] for x in lines if key in x}.items())

            told = by_step("failures")                              # of RL's rollouts
            if kinds := sorted({kind for _, failures in told for kind in failures}):
                draw(folder / f"{name}_failures.svg", f"{name}: invalid rollouts", "step", "rollouts",
                     {kind: [(step, failures.get(kind, 0)) for step, failures in told] for kind in kinds})
            for key in CURVES:
                if len(points := by_step(key)) > 1:
                    draw(folder / f"{name}_{key}.svg", f"{name}: {key}", "step", key, {name: points})
