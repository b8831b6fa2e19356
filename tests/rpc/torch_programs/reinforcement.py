"""An agent that chooses actions for all observers in one batch, by `async_execution`."""

import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

STEPS, EPISODES = 6, 3


class Observer:
    """Has an environment: a point that is pushed left or right, and should stay at 0."""

    def __init__(self, number) -> None:
        self.number = number
        self.name = rpc.get_worker_info().name

    def run_episode(self, agent_rref):
        """Steps, each with an action of the agent; the rewards."""
        state = torch.tensor([1.0 / (1 + self.number), -0.1 * self.number])
        rewards = torch.zeros(STEPS)
        for step in range(STEPS):
            action = rpc.rpc_sync(
                agent_rref.owner(),
                Agent.select_action_batch,
                args=(agent_rref, self.number, state),
            )
            speed = state[1] + (0.2 if action else -0.2)
            state = torch.stack([state[0] + speed, speed])
            rewards[step] = -state[0].abs()
        return self.number, rewards


class Agent:
    """Has the policy."""

    def __init__(self, names) -> None:
        self.agent_rref = rpc.RRef(self)
        self.observers = [
            rpc.remote(name, Observer, args=(number,)) for number, name in enumerate(names)
        ]
        torch.manual_seed(7)
        self.policy = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.sampler = torch.Generator().manual_seed(9)
        self.lock = threading.Lock()
        self.states = torch.zeros(len(names), 2)
        self.pending = len(names)
        self.future_actions = torch.futures.Future()
        self.log_probs = []

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref, number, state):
        """The action of one observer, once the states of all have come."""
        self = agent_rref.local_value()
        with self.lock:
            future_action = self.future_actions.then(
                lambda future_actions: future_actions.wait()[number].item()
            )
            self.states[number].copy_(state)
            self.pending -= 1
            if self.pending == 0:
                self.pending = len(self.observers)
                log_probs = self.policy(self.states.clone()).log_softmax(dim=1)
                actions = torch.multinomial(log_probs.exp(), 1, generator=self.sampler)
                self.log_probs.append(log_probs.gather(1, actions)[:, 0])
                future_actions = self.future_actions
                self.future_actions = torch.futures.Future()
                future_actions.set_result(actions[:, 0])
        return future_action

    def run_episode(self):
        """All observers, then a step of the optimizer; the loss and the rewards."""
        futures = [ob.rpc_async().run_episode(self.agent_rref) for ob in self.observers]
        found = dict(torch.futures.wait_all(futures))
        rewards = torch.stack([found[number] for number in sorted(found)], dim=1)
        returns = rewards.flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / returns.std()
        loss = -(torch.stack(self.log_probs) * returns).sum()
        self.log_probs = []
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [loss.item(), rewards.sum().item()]


def run(rank, world_size):
    """One process."""
    names = ["agent", *(f"observer{n}" for n in range(1, world_size))]
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size)
    numbers = []
    if rank == 0:
        agent = Agent(names[1:])
        for _ in range(EPISODES):
            numbers += agent.run_episode()
    rpc.shutdown()
    return numbers
