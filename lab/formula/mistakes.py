"""The names of what is wrong or unusual in a loss, and what is said of it. More sentences stand
beside the rows of the table (terms.py)."""
from .invariances import INVARIANCES
from .terms import TOKENS

MISPLACED = ("The old log-probs are one place off: the ratio of a token is formed with that of its "
             "neighbour.")
WRONG = {  # what is hardly ever meant, the worst first. More stands beside the rows of the table
    "zero": "The gradient is zero on every batch: nothing is trained.",
    "no reward": "The reward trains nothing: no push depends on it.",
    "sign reversed": "The sign is reversed: good answers are made less probable.",
    "shift 0": "The shift is missing: the logits at a token are taken for that token, and they "
               "predict the next one.",
    "shift 2": "The shift is made twice: logits are taken for the token after next.",
    "shift -1": "The shift goes the wrong way: logits stand for the token before.",
    "mask inverted": "Only what is no answer is trained: the mask is inverted.",
    "mask late": "The mask is one place late: the first token of an answer is not trained, and "
                 "what follows its end is.",
    "mask early": "The mask is one place early: the last token of the prompt is trained, and the "
                  "end of the answer is not.",
    **{code: row.wrong for code, row in TOKENS.items() if row.wrong},
    "turns otherwise": "Where an environment replies within an answer, the loss is another one, or "
                       "trains other tokens than batch.mask has.",
    "old misplaced 1": MISPLACED, "old misplaced -1": MISPLACED,
    "dead nan": "Groups with equal rewards give 0 / 0, which is not a number.",
    "dead raises": "The loss raises where the rewards of a group are equal.",
    "raises": "The loss raises on some batches.",
    **{f"{name} elsewhere": f"{what} stands outside the answers, too: at their prompt, their "
       "padding or their replies." for name, what in (("kl", "A KL term"),
                                                      ("entropy", "The entropy bonus"))},
    "kl reversed": "A KL term has the wrong sign: it drives the policy away from the reference.",
    "entropy reversed": "The entropy bonus has the wrong sign: it lowers the entropy.",
    **{name: sentence for name, (sentence, _) in INVARIANCES.items()}}
UNUSUAL = {  # what is sometimes meant, and often not
    "unequal groups": "Where groups have different sizes, the loss is another one.",
    "times {factor}": "The gradient is multiplied by a number.",
    "temperature {T}": "The log-probs are at another temperature than 1, so the old ones have to "
                       "be that, too."}
