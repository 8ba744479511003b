"""On-policy distillation: a teacher says of every token of the policy's own answers how likely it
would have been.

    A_t = log q_t - log p_t       q: the teacher's probability of the token, p: the policy's

A token that the teacher finds likelier than the policy does is pushed up, one that it finds less
likely is pushed down. At a fixed prefix this has, on average, the gradient of -KL(policy ||
teacher), so it is the term of --kl 1 --kl_kind k2 with the teacher in the place of the initial
model, and without any reward. That the policy also decides which prefixes it reaches is left out,
as it is there.

No reward is looked at, and no token is left without an advantage. That makes it a baseline for
other ways to spread credit: it knows of every token what one wants to know, if the teacher is good.
"""
from torch import Tensor

from lab.engine.errors import UserError
from lab.engine.forward import frozen_log_probs
from lab.engine.methods import advantage
from lab.engine.model_folder import read_model_folder
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import load_tokenizer
from run import find
from qwen2_model import read_config


@advantage
class teacher:
    """log q - log p of each token, where q is the probability that the model in the folder
    `teacher` gives it, and p the policy's (on-policy distillation). It has to have the policy's
    tokens, and may be larger."""

    def __init__(self, policy: Policy, *, teacher: str = ""):
        if not teacher:
            raise UserError("--advantage teacher needs --teacher FOLDER, the folder of a model "
                            "that is better than the one that is trained")
        folder = find(teacher)
        tokens = load_tokenizer(folder, read_config(folder).vocab_size).get_vocab()
        if tokens != policy.tokenizer.get_vocab():
            raise UserError(f"--teacher {teacher}: this model has other tokens than the one that "
                            "is trained, so it cannot say how likely a token is")
        model = read_model_folder(folder, policy.model.device)
        self.model = model.compute_in(policy.model.compute_dtype).requires_grad_(False)
        self.metrics: dict[str, float | None] = {"teacher_kl": None}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        log_q = frozen_log_probs(self.model, rollouts, rollouts.rows, policy.settings.micro_batch)
        gap = (log_q - rollouts.log_prob.detach()) * rollouts.mask
        # KL(policy || teacher) for a token, estimated from the tokens that were sampled
        self.metrics["teacher_kl"] = -float(gap.sum() / rollouts.mask.sum().clamp(min=1))
        return gap
