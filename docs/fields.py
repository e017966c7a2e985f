"""For the reference: configs of heads are dataclasses, because transformers' `PreTrainedConfig` makes them so."""

import griffe

DATACLASS = griffe.ExprName("dataclasses.dataclass")


class ConfigFields(griffe.Extension):
    """Mark subclasses of transformers' configs as dataclasses, so that their fields have types and defaults."""

    def on_class(self, *, cls, **_):
        """Add the decorator that transformers applies when the class is created."""
        is_config = any(str(base).endswith("Config") for base in cls.bases)
        if is_config and "__init__" not in cls.members:
            cls.decorators.append(griffe.Decorator(DATACLASS, lineno=cls.lineno, endlineno=cls.lineno))
