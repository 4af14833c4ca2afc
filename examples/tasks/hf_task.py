"""A model of transformers that begins at random: prsgd compare --task examples/tasks/hf_task.py --period 1 8"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import prsgd

tokens = torch.randint(0, 40, (1200, 12))  # sentences of twelve words: does one of these two occur?
labels = ((tokens == 7) | (tokens == 8)).any(dim=1).long()
shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_dropout_prob=0.0, **shape))

    def forward(self, x: Tensor) -> Any:
        return self.bert(input_ids=x).logits


train, test = (tokens[:1000], labels[:1000]), (tokens[1000:], labels[1000:])
loss = nn.functional.cross_entropy
task = prsgd.task(model=Classifier, train=train, test=test, loss=loss, optimizer="adamw", lr=0.01, batch_size=8)
