"""vLLM on a CPU, with an output matrix that follows the weights which --rollouts hands over.

    PYTHONPATH=. vllm serve models/tiny ... --worker-cls bridges.vllm_worker.Worker

On a CPU vLLM multiplies by a packed copy of each matrix. Where the output matrix is that of the
embeddings, it makes no new copy when it loads weights, and goes on with the old one.
bridges/rollouts_by_a_server.md has the whole command.
"""
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    def reload_weights(self, *arguments, **named) -> None:
        super().reload_weights(*arguments, **named)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
