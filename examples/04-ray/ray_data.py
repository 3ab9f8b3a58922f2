"""Train on what Ray Data reads and computes: files anywhere, preprocessing on the whole cluster.

    python ray_data.py --num-gpus 2

The dataset is computed once, in its own order, and kept in Ray's object store. The ranks read their rows from there in
the order of each epoch: every row once, also when the run is killed and resumes with another number of ranks.
"""

import argparse
import logging

import ray
import ray.data
from digits import load_arrays, make_model
from torch.utils.data import DataLoader

from distributed import RayRows, RayTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num-gpus", type=int, default=2, help="devices; CPU processes where there is no CUDA")
parser.add_argument("--address", default="local", help="of a Ray cluster; by default one of this machine, for this")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--run-dir", help="where the run writes; by default runs/<time>")


def normalize(batch):
    """Runs in Ray's own processes, on whichever node has room."""
    images = batch["image"]
    return {"image": (images - images.mean(1, keepdims=True)) / images.std(1, keepdims=True), "label": batch["label"]}


def main():
    arguments = parser.parse_args()
    ray.init(
        address=arguments.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        num_cpus=max(2, arguments.num_gpus) if arguments.address == "local" else None,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    images, labels = load_arrays()  # in earnest: ray.data.read_parquet("s3://…"), read_images, read_tfrecords …
    rows = ray.data.from_items([{"image": image, "label": label} for image, label in zip(images, labels, strict=True)])
    data = RayRows(rows.repartition(4).map_batches(normalize), columns=("image", "label"))
    trainer = RayTrainer(
        make_model(),
        num_gpus=arguments.num_gpus,
        epochs=arguments.epochs,
        learning_rate=3e-3,
        run_dir=arguments.run_dir,
    )
    history = trainer.fit(DataLoader(data, batch_size=32, shuffle=True))
    accuracy = history["accuracy"][-1]
    print(f"{len(data)} rows, {history.steps} steps on {history.world_size} ranks, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
