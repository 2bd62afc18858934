"""Calls in the form <invoke name="f"><parameter name="k">v</parameter></invoke>, several in one block, as
MiniMax, DeepSeek V3.2 and Muse write them with tags of their own."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.tagged_values import read_argument


def syntax_of(begin: str, end: str, prefix: str = "", *, says_string: bool = False) -> CallSyntax:
    """begin, end: the texts around calls. prefix: the beginning of each tag's name. says_string: an attribute
    says whether a value is a string."""
    argument = TaggedArgument(
        f'<{prefix}parameter name="',
        '">' if not says_string else ">",
        f"</{prefix}parameter>",
        after="\n",
        string='" string="true"' if says_string else "",
        other='" string="false"' if says_string else "",
    )
    return CallSyntax(
        f'<{prefix}invoke name="', '">\n', f"</{prefix}invoke>\n", begin, end, argument=argument, may_end=True
    )


class Invokes(ChatFormat):
    prefix: str = ""  # the beginning of each tag's name

    def calls(self, reader: Reader, mark: str) -> Steps:
        invoke, end_of_invoke = f'<{self.prefix}invoke name="', f"</{self.prefix}invoke>"
        parameter, end = f'<{self.prefix}parameter name="', f"</{self.prefix}parameter>"
        yield from reader.expect_mark(invoke)
        while True:
            name, _ = yield from reader.up_to('">')
            if not reader.accepts(name := name.strip()):
                raise Malformed
            has_begun = False
            while tag := (yield from reader.one_of(parameter, end_of_invoke)):
                if tag == end_of_invoke:
                    break
                head, _ = yield from reader.up_to(">")
                key, _, more = head.partition('"')
                if not has_begun:
                    reader.begin(name)
                    has_begun = True
                is_string = 'string="true"' in more if "string=" in more else None
                yield from read_argument(reader, name, key, end, is_string=is_string)
            if not tag:
                reader.check_cut(parameter, end_of_invoke)
                if not has_begun:
                    raise Malformed
            if not has_begun:
                reader.begin(name)
            reader.end_arguments()
            if not (yield from reader.one_of(invoke)):
                return
            reader.next_call()
