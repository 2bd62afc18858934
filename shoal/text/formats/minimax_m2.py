"""MiniMax M2: <minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>...
</minimax:tool_call>"""

from __future__ import annotations

from shoal.text.reading.invokes import Invokes, syntax_of


class MiniMaxM2(Invokes):
    name = "minimax_m2"
    signs = (("<minimax:tool_call>",),)
    openings = ("<minimax:tool_call>",)
    closing = "</minimax:tool_call>"
    syntaxes = (syntax_of("<minimax:tool_call>\n", "</minimax:tool_call>"),)
