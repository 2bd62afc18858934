"""DeepSeek V3.2 and V4: <｜DSML｜function_calls> (V4: tool_calls) around
<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter></｜DSML｜invoke>.
string="false" means JSON."""

from __future__ import annotations

from shoal.text.reading.invokes import Invokes, syntax_of


class DeepSeekV32(Invokes):
    name = "deepseek_v32"
    signs = (("｜DSML｜", "function_calls"),)
    openings = ("<｜DSML｜function_calls>",)
    closing = "</｜DSML｜function_calls>"
    prefix = "｜DSML｜"
    syntaxes = (
        syntax_of("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", prefix, says_string=True),
    )


class DeepSeekV4(Invokes):
    name = "deepseek_v4"
    signs = (("｜DSML｜",),)
    openings = ("<｜DSML｜tool_calls>",)
    closing = "</｜DSML｜tool_calls>"
    prefix = "｜DSML｜"
    syntaxes = (syntax_of("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", prefix, says_string=True),)
