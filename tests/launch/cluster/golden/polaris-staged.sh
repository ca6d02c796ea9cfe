#!/bin/bash
# mnist/large_batch on 4 nodes x 4 ranks, written by `tutti submit --on polaris`.
#PBS -N mnist-large_batch
#PBS -A datascience
#PBS -q prod
#PBS -l select=4:system=polaris
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
#PBS -l walltime=02:00:00
#PBS -o /scratch/me/runs/mnist/large_batch/2026-11-15_101500/logs/job-pbs.out
#PBS -j oe
#PBS -r y

# The run, and where relative paths of its recipe start.
FOLDER=/scratch/me/runs/mnist/large_batch/2026-11-15_101500
cd '/scratch/me/my project' || exit
# The scheduler writes its output at the end of the job; this file can be followed before.
exec >>"$FOLDER/logs/job-$PBS_JOBID.out" 2>&1

# The software.
module use /soft/modulefiles
module load conda
conda activate base
set -u  # not earlier: modules and environments use unset variables
PYTHON=/home/me/venv/bin/python

# The environment of the ranks; the first variable is the end of the allocation.
ends=$(($(date +%s) + 7200))
export TUTTI_JOB_ENDS="$ends"
export TUTTI_FAILURE_NOTES="$FOLDER/logs/notes"
export TUTTI_SECRET_FILE="$FOLDER/secret"
export OMP_NUM_THREADS=8
export GLOO_SOCKET_IFNAME=hsn0
export NCCL_SOCKET_IFNAME=hsn0

# How a command of tutti is started on every rank.
ranks=(
  mpiexec -n 16 -ppn 4 --depth 8 --cpu-bind depth
  bash "$FOLDER/stage.sh" run -m tutti
)
# And how the environment is staged, once on every node.
nodes=(
  mpiexec -n 4 -ppn 1
  bash "$FOLDER/stage.sh"
)
job="$PBS_JOBID"

# Has the run been started too often, or been cancelled? Then the job ends here.
"$PYTHON" -m tutti requeue "$FOLDER" --begin "$PBS_JOBID" || exit

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
