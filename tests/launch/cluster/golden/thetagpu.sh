#!/bin/bash
# mnist/large_batch on 2 nodes x 8 ranks, written by `tutti submit --on thetagpu`.
#COBALT --jobname mnist-large_batch
#COBALT -A SDL_Workshop
#COBALT -q full-node
#COBALT -n 2
#COBALT --attrs filesystems=home,theta-fs0
#COBALT -t 30
#COBALT -o /scratch/me/runs/mnist/large_batch/2026-11-15_101500/logs/job-cobalt.out
#COBALT -e /scratch/me/runs/mnist/large_batch/2026-11-15_101500/logs/job-cobalt.out

# The run, and where relative paths of its recipe start.
FOLDER=/scratch/me/runs/mnist/large_batch/2026-11-15_101500
cd '/scratch/me/my project' || exit
# The scheduler writes its output at the end of the job; this file can be followed before.
exec >>"$FOLDER/logs/job-$COBALT_JOBID.out" 2>&1

# The software.
set -u  # not earlier: modules and environments use unset variables
PYTHON=/home/me/venv/bin/python

# The environment of the ranks; the first variable is the end of the allocation.
ends=${COBALT_ENDTIME:-$(($(date +%s) + 1800))}
export TUTTI_JOB_ENDS="$ends"
export TUTTI_FAILURE_NOTES="$FOLDER/logs/notes"
export TUTTI_SECRET_FILE="$FOLDER/secret"
export OMP_NUM_THREADS=16

# How a command of tutti is started on every rank.
ranks=(
  mpirun --hostfile "$COBALT_NODEFILE" -np 16 --map-by ppr:8:node:pe=16 --bind-to core -x TUTTI_JOB_ENDS -x TUTTI_FAILURE_NOTES -x TUTTI_SECRET_FILE -x OMP_NUM_THREADS
  "$PYTHON" -m tutti
)

# Has the run been started too often, or been cancelled? Then the job ends here.
"$PYTHON" -m tutti requeue "$FOLDER" --begin "$COBALT_JOBID" || exit

# The shell survives these signals, and notes a SIGTERM; the ranks save and end.
told=
trap 'told=yes' TERM
trap : USR1
# Training resumes from the newest checkpoint, or begins where there is none.
"${ranks[@]}" train "$FOLDER"
code=$?

# By the exit code, the run is complete, is requeued, or has failed.
"$PYTHON" -m tutti requeue "$FOLDER" --code "$code" ${told:+--told}
