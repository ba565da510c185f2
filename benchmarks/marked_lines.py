"""What a rank of a benchmark wants its parent to know, as ranks of the tools tell it."""

from thinwire.tools.marked_lines import tell, told_in

__all__ = ["tell", "told_in"]
