"""How the layers of one model are called in another: the rules of a map, read and applied.

A rule whose old name is a whole layer name comes first and is final, so that two names can be swapped. All others are
applied one after the other, each to what the last has made: a port renames at several places of one name
(`model.layers.*=transformer.h.*`, then `*.self_attn.*=*.attn.*`).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from replay.errors import BadQuery
from replay.format import parsed

Map = Mapping[str, str] | Iterable[str] | str | Path | None
"""Rules old to new: a mapping, "old=new" strings, or a TOML or JSON file that holds a table of them."""


def rules_of(given: Map) -> dict[str, str]:
    """Return the rules of a map.

    Raises:
        BadQuery: the map, or its file, is no table of names.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _checked(given, "The map")
    if isinstance(given, Path):
        return _of_file(given)
    rules: dict[str, str] = {}
    for item in (given,) if isinstance(given, str) else given:
        if "=" in item and not Path(item).is_file():
            old, _, new = item.partition("=")
            rules[old.strip()] = new.strip()
        else:
            rules |= _of_file(Path(item))
    return rules


def _of_file(path: Path) -> dict[str, str]:
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        found = parsed(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise BadQuery(
            f"The map {str(path)!r} is no rule 'old=new', and there is no such file. "
            'A file is TOML or JSON, such as: "model.layers.*" = "transformer.h.*"'
        ) from None
    except (OSError, ValueError) as error:
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise BadQuery(f"The map {path} cannot be read as {language}: {error}") from None
    return _checked(found, f"The map {path}")


def _checked(rules: object, what: str) -> dict[str, str]:
    if not isinstance(rules, Mapping) or not all(isinstance(n, str) for pair in rules.items() for n in pair):
        raise BadQuery(f'{what} is no table of names, each a string to a string: "old.*" = "new.*".')
    return dict(rules)


def renamed(layers: Iterable[str], rules: Mapping[str, str]) -> dict[str, str]:
    r"""Return the new name of each layer.

    `*` stands for any characters and `?` for one; the n-th of the new name is what the n-th of the old has matched.
    Without them, a rule is for the layer of that name and for all below it. `re:` begins a regular expression, whose
    groups are `\1`, `\2`, … of the new name.

    Raises:
        BadQuery: a rule cannot be understood, matches nothing, or gives two layers the same name.
    """
    names = {layer: layer for layer in layers}
    used: set[str] = set()
    final: set[str] = set()
    for old, new in rules.items():
        if old in names and (new == "" or not _is_pattern(new)):
            names[old] = new
            final.add(old)
            used.add(old)
    for old, new in rules.items():
        expression, template = _compiled(old, new)
        for layer, name in names.items():
            if layer in final:
                continue
            match = expression.fullmatch(name)
            if match:
                names[layer] = _filled(match, template, old, new)
                used.add(old)
    for old in rules:
        if old not in used:
            some = ", ".join(map(repr, list(names)[:3]))
            raise BadQuery(f"The rule {old!r} of the map matches no layer of A, which has layers such as {some}.")
    by_new: dict[str, str] = {}
    for layer, name in names.items():
        if by_new.setdefault(name, layer) != layer:
            raise BadQuery(f"The map gives {by_new[name]!r} and {layer!r} the same name {name!r} in B.")
    return names


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name or "?" in name


def _compiled(old: str, new: str) -> tuple[re.Pattern[str], str]:
    if old.startswith("re:"):
        try:
            return re.compile(old.removeprefix("re:")), new
        except re.error as error:
            raise BadQuery(f"The rule {old!r} of the map is no regular expression: {error}.") from None
    if not _is_pattern(old):
        if _is_pattern(new):
            raise BadQuery(f"The rule {old!r} = {new!r} of the map has a wildcard in the new name alone.")
        return re.compile(re.escape(old) + r"(\..*)?"), new.replace("\\", r"\\") + r"\g<1>"
    parts = re.split(r"([*?])", old)
    pattern = "".join({"*": "(.*?)", "?": "(.)"}.get(part, re.escape(part)) for part in parts)
    wild = sum(part in ("*", "?") for part in parts)
    template, number = "", 0
    for part in re.split(r"([*?])", new):
        if part in ("*", "?"):
            number += 1
            template += rf"\g<{number}>"
        else:
            template += part.replace("\\", r"\\")
    if number > wild:
        raise BadQuery(f"The rule {old!r} = {new!r} of the map has more wildcards in the new name than in the old.")
    return re.compile(pattern, re.DOTALL), template


def _filled(match: re.Match[str], template: str, old: str, new: str) -> str:
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise BadQuery(f"The rule {old!r} = {new!r} of the map cannot be applied: {error}.") from None
