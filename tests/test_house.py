"""The plan of the house: which file may import which. A student reads from the ground floor up, and never in a circle."""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHOD = {"model", "diffusion", "ranking", "sample", "train_ar", "train_cft", "train_opd", "train_rl", "evaluate"}
COMMANDS = {"train_ar", "train_cft", "train_opd", "train_rl", "evaluate", "plumbing.show"}


def files():
    """{module name: path} of all that is not a test."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("plumbing/*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports():
    """{module: modules of the house that it imports}. All imports stand at the top: one in a function hides a circle."""
    house, found = files(), {}
    for module, path in house.items():
        tree, found[module] = ast.parse(path.read_text(encoding="utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert node in tree.body, f"{path}, line {node.lineno}: an import that is not at the top of the file"
        for node in tree.body:
            if isinstance(node, ast.Import):
                found[module] |= {a.name for a in node.names} & set(house)
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{a.name}" for a in node.names} & set(house)
                found[module] |= names or {node.module} & set(house)
    return found


def test_the_top_level_shows_the_method():
    assert {p.stem for p in ROOT.glob("*.py")} == METHOD


def test_imports_point_one_way():
    """Take away, again and again, what imports nothing that is left. A circle would stay."""
    left, floors = imports(), 0
    while left:
        ground = {module for module, needs in left.items() if not needs & set(left)}
        assert ground, f"these import each other in a circle: {sorted(left)}"
        left, floors = {m: needs for m, needs in left.items() if m not in ground}, floors + 1
    assert floors <= 8


def test_no_command_is_imported():
    for module, needs in imports().items():
        assert not needs & COMMANDS, f"{module} imports {needs & COMMANDS}"


def test_the_ground_floor():
    """Settings and the model import nothing of the house, the model's world knows no plumbing, and data no model."""
    found = imports()
    assert not found["plumbing.settings"] and not found["model"]
    assert found["diffusion"] == {"model"}
    for module in found:
        if module.startswith("data."):
            assert all(n.startswith("data.") or n == "plumbing.settings" for n in found[module]), module


def test_no_function_and_no_file_is_long():
    for path in files().values():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path}: {node.name}"
