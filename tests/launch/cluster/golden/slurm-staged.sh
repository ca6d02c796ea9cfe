#!/bin/bash
# mnist/large_batch on 4 nodes x 4 ranks, written by `tutti submit --on slurm`.
#SBATCH --job-name=mnist-large_batch
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@120
#SBATCH --output=/scratch/me/runs/mnist/large_batch/2026-11-15_101500/logs/job-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

# The run, and where relative paths of its recipe start.
FOLDER=/scratch/me/runs/mnist/large_batch/2026-11-15_101500
cd '/scratch/me/my project' || exit

# The software.
set -u  # not earlier: modules and environments use unset variables
PYTHON=/home/me/venv/bin/python

# The environment of the ranks; the first variable is the end of the allocation.
ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null)
ends=$(date --date="${ends:-unknown}" +%s 2>/dev/null) || ends=$(($(date +%s) + 7200))
export TUTTI_JOB_ENDS="$ends"
export TUTTI_FAILURE_NOTES="$FOLDER/logs/notes"
export TUTTI_SECRET_FILE="$FOLDER/secret"
export OMP_NUM_THREADS=2

# How a command of tutti is started on every rank.
ranks=(
  srun --nodes=4 --ntasks=16 --ntasks-per-node=4 --cpus-per-task=2 --kill-on-bad-exit=0 --wait=60
  bash "$FOLDER/stage.sh" run -m tutti
)
# And how the environment is staged, once on every node.
nodes=(
  srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0
  bash "$FOLDER/stage.sh"
)
job="$SLURM_JOB_ID"

# Has the run been started too often, or been cancelled? Then the job ends here.
"$PYTHON" -m tutti requeue "$FOLDER" --begin "$SLURM_JOB_ID" || exit

# The environment is copied to the disk of every node; where that fails, the shared one is used.
begin=$SECONDS
"${nodes[@]}" prepare "$job"
bash "$FOLDER/stage.sh" broadcast "$job"
"${nodes[@]}" unpack "$job"
echo "tutti: the environment was staged in $((SECONDS - begin)) s."

# The shell survives these signals, and notes a SIGTERM; the ranks save and end.
told=
trap 'told=yes' TERM
trap : USR1
# Training resumes from the newest checkpoint, or begins where there is none.
"${ranks[@]}" train "$FOLDER"
code=$?

# By the exit code, the run is complete, is requeued, or has failed.
"$PYTHON" -m tutti requeue "$FOLDER" --code "$code" ${told:+--told}
last=$?
"${nodes[@]}" remove "$job"
exit "$last"
