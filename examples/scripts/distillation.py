"""A small student of a frozen teacher on handwritten digits, after PyTorch's knowledge distillation tutorial."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import irongrad as ig


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))


def make_teacher_step(batch: int = 64, width: int = 256) -> ig.TrainStep:
    torch.manual_seed(0)
    teacher = network(width)
    inputs = {"x": torch.rand(batch, 64), "y": torch.arange(batch) % 10}
    return ig.TrainStep(teacher, nn.CrossEntropyLoss(), torch.optim.Adam(teacher.parameters(), lr=1e-3), inputs)


def make_step(teacher: nn.Module | None = None, batch: int = 64, width: int = 16, temperature: float = 2.0):
    torch.manual_seed(0)
    student, teacher = network(width), (network(256) if teacher is None else teacher).eval().requires_grad_(False)

    def loss(student_logits: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict]:
        soft_targets = F.softmax(teacher(x) / temperature, -1)
        soft_prob = F.log_softmax(student_logits / temperature, -1)
        distilled = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * temperature**2
        right = (student_logits.argmax(1) == y).float().mean()
        return 0.75 * distilled + 0.25 * F.cross_entropy(student_logits, y), {"right": right}

    return ig.TrainStep(
        student, loss, torch.optim.Adam(student.parameters(), lr=1e-3), make_teacher_step(batch).inputs,
        loss_inputs=["x", "y"], modules={"teacher": teacher},
    )  # fmt: skip


def train(session, epochs: int = 20, batch: int = 64) -> None:
    images, labels = load_digits(return_X_y=True)
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1797)
        for rows in order[: 1797 // batch * batch].reshape(-1, batch):
            given = {"x": np.float32(images[rows] / 16), "y": labels[rows]}
            found = session.train_step(**given)
        print(f"epoch {epoch + 1}: last loss and values {found}, in evaluation mode {session.eval_step(**given)}")


if __name__ == "__main__":
    teacher_step = make_teacher_step()
    with ig.compile(teacher_step, "build/teacher").load() as session:
        train(session)
        session.save("build/teacher.safetensors")
    ig.load_checkpoint("build/teacher.safetensors", teacher_step.model, teacher_step.optimizer)
    train(ig.compile(make_step(teacher_step.model), "build/student").load())
