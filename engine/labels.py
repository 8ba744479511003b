"""What a token is called: the section of the answer it stands in, and the kind of text it is.

Codes, as credit files hold them. A task assigns them (its method `label`); weightings and tables
use them.
"""
OTHER, THINK, ANSWER = range(3)                                # section codes
WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, END = range(7)    # kind codes
SECTIONS = ("other", "think", "answer")
KINDS = ("word", "space", "number", "operator", "bracket", "tag", "end")
