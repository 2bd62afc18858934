"""A conversation without a terminal and without a model."""

import re

from shoal.cli.chat import Chat
from shoal.cli.keyboard import Keyboard
from shoal.cli.speakers import Piece


class Scripted:
    """Answers with the pieces that it is given."""

    name, place, context_len, max_tokens = "scripted", "here", None, None

    def __init__(self, *answers):
        self.answers = list(answers)

    def count(self, messages):
        return None

    def answer(self, messages, settings):
        yield from self.answers.pop(0)


def test_an_answer_without_text_is_said_to_be_one_and_its_question_is_taken_back(capsys):
    speaker = Scripted([Piece("", "", 1, "stop")], [Piece("Hello"), Piece("", "", 2, "stop")])
    chat = Chat(speaker, Keyboard(False), None, {})
    chat.say("one")
    assert capsys.readouterr().err == "[no text came; your message is taken back]\n" and chat.messages == []
    chat.say("two")
    assert re.fullmatch(r"\[2 tokens, first after \d+\.\d\d s\]\n", capsys.readouterr().err)
    assert [message["content"] for message in chat.messages] == ["two", "Hello"]
