# a few steps on a processor
out_dir = "out-tiny"
eval_interval = 4
n_layer = 1
n_embd = 16
max_iters = 6
