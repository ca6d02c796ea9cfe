#!/usr/bin/env bash
# Installs Open MPI, MPICH, Slurm, an ssh server, LaTeX and a browser from Debian's packages where this user may; otherwise says what is skipped.
set -u
missing=()
command -v mpirun.openmpi >/dev/null || missing+=(openmpi-bin)
command -v mpiexec.mpich >/dev/null || missing+=(mpich)
# Where services start by themselves, installing an ssh server would open a port: there it is left to the user.
test -d /run/systemd/system || command -v sshd >/dev/null || test -x /usr/sbin/sshd || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
# The tests start Slurm and munge themselves, in namespaces; where services start by themselves, installing is left to the user.
export PATH="$PATH:/usr/sbin:/sbin"
if [ ! -d /run/systemd/system ]; then
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null || missing+=(slurm-wlm)
  command -v munged >/dev/null || missing+=(munge)
fi
command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
command -v sshfs >/dev/null || missing+=(sshfs openssh-sftp-server) # a network file system between hosts
command -v pdflatex >/dev/null || missing+=(texlive-latex-base) # typesets what `tutti propose` writes
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core) # looks at the pages that reports are
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}; the tests that need them are skipped (as root: apt-get install ${missing[*]})"
  exit 0
fi
echo "installing ${missing[*]} for the tests"
{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 ||
  echo "could not install ${missing[*]}; the tests that need them are skipped"
