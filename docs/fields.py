"""For the reference: types and defaults of all fields and parameters, also of those that static analysis misses."""

import ast
import re

import griffe

DATACLASS = griffe.ExprName("dataclasses.dataclass")
SEVERAL = re.compile(r"^( +)((?:\w+, )+\w+)(: .*(?:\n\1 +.*)*)", flags=re.MULTILINE)
"""An entry of a docstring that describes several parameters."""


class Fields(griffe.Extension):
    """Complete what is known of configs, parameters that share a description, and defaults that are constants."""

    def on_class_instance(self, *, cls, **_):
        """Mark subclasses of transformers' configs as dataclasses, which `PreTrainedConfig` makes of them."""
        if any(str(base).endswith("Config") for base in cls.bases):
            cls.decorators.append(griffe.Decorator(DATACLASS, lineno=cls.lineno, endlineno=cls.lineno))

    def on_class(self, *, cls, **_):
        """Describe each field separately."""
        _separate(cls)

    def on_function(self, *, func, **_):
        """Describe each parameter separately."""
        _separate(func)

    def on_package(self, *, pkg, **_):
        """Show the values of constants that are defaults."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                parameter.default = _value(parameter.default, pkg)


def _separate(documented):
    if documented.docstring is not None and "Args:" in documented.docstring.value:
        head, arguments = documented.docstring.value.split("Args:", 1)
        arguments = SEVERAL.sub(
            lambda found: "\n".join(found[1] + name + found[3] for name in found[2].split(", ")), arguments
        )
        documented.docstring.value = f"{head}Args:{arguments}"


def _functions(parent):
    for member in parent.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)


def _value(default, pkg):
    if not isinstance(default, griffe.ExprName):
        return default
    try:
        value = pkg.modules_collection[default.canonical_path].value
        ast.literal_eval(str(value))
    except (KeyError, ValueError, SyntaxError, AttributeError, griffe.GriffeError):
        return default  # not a constant, or not of this package
    return value
