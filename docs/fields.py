"""For the reference: types and defaults of all fields and parameters, also of those that static analysis misses."""

import ast
import re

import griffe

DATACLASS = griffe.ExprName("dataclasses.dataclass")
SEVERAL = re.compile(r"^( +)((?:\w+, )+\w+)(: .*(?:\n\1 +.*)*)", flags=re.MULTILINE)
"""An entry of a docstring that describes several parameters."""

PAGE = re.compile(r"(?<![\w/`])docs/([\w/-]+)\.md")
"""A page that a docstring names; the reference, in `docs/reference/`, links to it."""

SENTINELS = {"hf_specdec.generation.mixin.STORED_DEFAULT": "generation_config.speculative"}
"""Defaults that stand for another value, and what that is."""

ARITHMETIC = (ast.Expression, ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Tuple, ast.List,
              ast.Load)  # fmt: skip


class Fields(griffe.Extension):
    """Complete what is known of configs, parameters that share a description, and defaults that are constants."""

    def on_class_instance(self, *, cls, **_):
        """Mark subclasses of transformers' configs as dataclasses, which `PreTrainedConfig` makes of them."""
        if any(str(base).endswith("Config") for base in cls.bases):
            cls.decorators.append(griffe.Decorator(DATACLASS, lineno=cls.lineno, endlineno=cls.lineno))

    def on_class(self, *, cls, **_):
        """Describe each field separately."""
        _complete(cls)

    def on_function(self, *, func, **_):
        """Describe each parameter separately."""
        _complete(func)

    def on_package(self, *, pkg, **_):
        """Show the values of constants that are defaults, and of names that stand for a `Literal` type."""
        for member in _members(pkg):
            if member.is_function:
                for parameter in member.parameters:
                    parameter.default = _value(parameter.default, pkg)
                    parameter.annotation = _literal(parameter.annotation, pkg)
            else:
                member.value = _value(member.value, pkg)
                member.annotation = _literal(member.annotation, pkg)


def _complete(documented):
    if documented.docstring is None:
        return
    text = PAGE.sub(r"[docs/\1.md](../\1.md)", documented.docstring.value)
    if "Args:" in text:
        head, arguments = text.split("Args:", 1)
        arguments = SEVERAL.sub(
            lambda found: "\n".join(found[1] + name + found[3] for name in found[2].split(", ")), arguments
        )
        text = f"{head}Args:{arguments}"
    documented.docstring.value = text


def _members(parent):
    """Yield all functions, and the fields of all classes."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        if member.is_function or (member.is_attribute and parent.is_class):
            yield member
        elif member.is_module or member.is_class:
            yield from _members(member)


def _literal(annotation, pkg):
    """Return a type with names of this package that stand for a `Literal` replaced by it, also in a union."""
    if isinstance(annotation, griffe.ExprBinOp):
        annotation.left, annotation.right = _literal(annotation.left, pkg), _literal(annotation.right, pkg)
    if not isinstance(annotation, griffe.ExprName):
        return annotation
    try:
        value = pkg.modules_collection[annotation.canonical_path].value
    except (KeyError, AttributeError, griffe.GriffeError):
        return annotation  # not of this package, or not a constant
    return value if str(value).startswith("Literal[") else annotation


def _value(default, pkg):
    """Return the value of a default that is a constant of this package, or arithmetic; all others as they are."""
    if not isinstance(default, griffe.ExprName):
        return default
    if default.canonical_path in SENTINELS:
        return SENTINELS[default.canonical_path]
    try:
        value = str(pkg.modules_collection[default.canonical_path].value)
        tree = ast.parse(value, mode="eval")
    except (KeyError, SyntaxError, AttributeError, griffe.GriffeError):
        return default  # not of this package, or not a constant
    if not all(isinstance(node, ARITHMETIC) for node in ast.walk(tree)):
        return default
    return repr(eval(compile(tree, "<default>", "eval")))
