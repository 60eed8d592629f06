"""A reward model as a reward: the number that a sequence classifier of transformers gives.

rewards = [{ use = "examples/own_reward_model.py:score", model = "owner/name", batch_size = 16 }]

It needs `pip install torch`, which jaxgrpo does not. JAX takes most of a GPU's memory when it
starts, so the default is the CPU; device = "cuda" needs XLA_CLIENT_MEM_FRACTION, as 0.7.
"""

import functools


def score(prompts, completions, model, batch_size=16, max_tokens=2048, device="cpu", **columns):
    """The score of each completion behind its prompt.

    Args:
      model: a folder or a name on the hub, of one label.
      batch_size: texts that are scored at once.
      max_tokens: of prompt and completion; of longer ones the last so many are read.
    """
    import torch

    tokenizer, classifier = _load(model, device)
    tokenizer.truncation_side = "left"
    texts = [_text(tokenizer, *pair) for pair in zip(prompts, completions, strict=True)]
    is_written = bool(texts) and not isinstance(prompts[0], str)  # special tokens by the template
    scores = []
    for first in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[first : first + batch_size],
            add_special_tokens=not is_written,
            padding=True,
            truncation=True,
            max_length=max_tokens,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logits = classifier(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
            ).logits
        scores += logits[:, 0].float().tolist()
    return scores


score.per_sample = True  # groups are scored while others still decode


@functools.cache  # read once, when the reward is first called
def _load(model, device):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval().to(device)
    if classifier.config.num_labels != 1:
        raise ValueError(f"{model} has {classifier.config.num_labels} labels, a reward model has 1")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if classifier.config.pad_token_id is None:  # tells where a text ends
        classifier.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, classifier


def _text(tokenizer, prompt, completion):
    """Prompt and completion as one text; messages as the reward model's chat template writes."""
    if isinstance(prompt, str):
        return prompt + completion
    return tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
