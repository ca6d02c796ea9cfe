#!/bin/bash
# mnist/large_batch on 8 nodes x 1 rank, written by `tutti submit --on cori`.
#SBATCH --job-name=mnist-large_batch
#SBATCH --account=dasrepo
#SBATCH --qos=regular
#SBATCH --constraint=knl
#SBATCH --nodes=8
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=272
#SBATCH --time=00:30:00
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
ends=$(date --date="${ends:-unknown}" +%s 2>/dev/null) || ends=$(($(date +%s) + 1800))
export TUTTI_JOB_ENDS="$ends"
export TUTTI_FAILURE_NOTES="$FOLDER/logs/notes"
export TUTTI_SECRET_FILE="$FOLDER/secret"
export OMP_NUM_THREADS=68
export KMP_BLOCKTIME=1

# How a command of tutti is started on every rank.
ranks=(
  srun --nodes=8 --ntasks=8 --ntasks-per-node=1 --cpus-per-task=272 --cpu-bind=cores --kill-on-bad-exit=0 --wait=60
  "$PYTHON" -m tutti
)

# Has the run been started too often, or been cancelled? Then the job ends here.
"$PYTHON" -m tutti requeue "$FOLDER" --begin "$SLURM_JOB_ID" || exit

# The shell survives these signals, and notes a SIGTERM; the ranks save and end.
told=
trap 'told=yes' TERM
trap : USR1
# Training resumes from the newest checkpoint, or begins where there is none.
"${ranks[@]}" train "$FOLDER"
code=$?

# By the exit code, the run is complete, is requeued, or has failed.
"$PYTHON" -m tutti requeue "$FOLDER" --code "$code" ${told:+--told}
