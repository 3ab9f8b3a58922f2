"""Train on ranks that Ray places on its cluster; without one, on a cluster of this machine that ends with the run.

    python ray_train.py --num-gpus 2
    python ray_train.py --num-gpus 2 --address auto                    a cluster that `ray start --head` began
    distributed train --script ray_train.py --num-nodes 4 --gpus-per-node 8 --address ray://head:10001

The run is the same as on any engine: settings, progress, checkpoints, resuming. What Ray adds is where the ranks live,
and that it starts them again elsewhere when a node is gone.
"""

import argparse

from digits import load_digits, make_model
from torch.utils.data import DataLoader

from distributed import RayTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num-gpus", type=int, default=2, help="devices; CPU processes where there is no CUDA")
parser.add_argument("--address", help="of a Ray cluster: auto, host:port or ray://host:port")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--run-dir", help="where the run writes; by default runs/<time>")
parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --run-dir")


def main():
    arguments = parser.parse_args()
    train_set, test_set = load_digits()
    trainer = RayTrainer(
        make_model(),
        address=arguments.address,
        num_gpus=arguments.num_gpus,
        epochs=arguments.epochs,
        learning_rate=3e-3,
        checkpoint_frequency=1,  # epochs: what a run resumes from when a rank or a node dies
        run_dir=arguments.run_dir,
        resume_from_checkpoint=arguments.resume,
    )
    history = trainer.fit(DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=128))
    if trainer.is_main:
        print(f"accuracy {trainer.best_accuracy:.3f} after {history.steps} steps on {history.world_size} ranks")
        print(f"checkpoint {history.checkpoint}")


if __name__ == "__main__":
    main()
