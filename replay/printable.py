"""What text of a trace may look like on a terminal or in a picture.

A trace may come from anybody. A layer's name with an escape sequence in it would move the cursor of whoever lists the
layers, change the title of the window, or hide a line; controls of writing direction make a name read as another one.
"""


def printable(text: object) -> str:
    """Return a text on one line: control characters, and bytes that are no text, as escapes."""
    found = str(text)
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)


def printable_lines(text: object) -> str:
    """Return a text likewise, with its lines as they are."""
    return "\n".join(map(printable, str(text).split("\n")))
