
# The values above are those of one environment; what follows is the same for all.
place="$LOCAL/tutti-environment-$UID-$DIGEST"
incoming="$place.${2:-}" # archives that arrive, and the copy until it is complete
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=10)

say() { echo "tutti: $(uname -n): $*"; }
use_shared() {
  say "$*. Ranks on this node use the shared environment."
  rm -rf "$incoming"
}

# Is the copy complete, and not a folder of another user?
is_ready() { [ -O "$place" ] && [ -O "$place/complete" ]; }

# On every node: is there a copy, or space for one?
prepare() {
  local old free
  for old in "$LOCAL/tutti-environment-$UID"-*; do # left by jobs that were killed, unused for an hour
    [ "$old" = "$place" ] || [ -e "$old/keep" ] || [ -n "$(find "$old" -maxdepth 1 -mmin -60 2>/dev/null)" ] || drop "$old"
  done
  if is_ready; then
    touch "$place/complete"
    return
  fi
  rm -rf "$incoming" 2>/dev/null
  if ! mkdir -m 700 "$incoming" 2>/dev/null; then # the disk itself is not made: a missing one would fill the root
    use_shared "no folder can be made in '$LOCAL'"
    return
  fi
  free=$(df -Pk "$incoming" | awk 'NR == 2 {print $4}')
  if ((free < NEEDED_KB)); then
    use_shared "$LOCAL has $((free / 1024)) MiB free, the environment needs $((NEEDED_KB / 1024)) MiB"
    return
  fi
  : >"$WANTED"
}

# Once, where the job script runs: send the archives to the nodes. A node that does not get one copies it for itself.
broadcast() {
  local archive
  [ -e "$WANTED" ] || return
  rm -f "$WANTED"
  if [ -n "${SLURM_JOB_ID:-}" ] && command -v sbcast >/dev/null; then
    for archive in "${ARCHIVES[@]}"; do
      if ! sbcast --force "$CACHE/$archive" "$incoming/$archive"; then
        say "sbcast failed: the nodes copy from $CACHE themselves."
        return
      fi
    done
  elif [ -f "${NODE_FILE:-}" ] && [ -d "$incoming" ]; then
    send_as_tree
  fi
}

# Every node that has the archives sends them to one that has not: nodes 1 to 2, then 1 and 2 to 3 and 4, and so on.
send_as_tree() {
  local hosts archive have sender
  mapfile -t hosts < <(awk '!seen[$0]++' "$NODE_FILE")
  for archive in "${ARCHIVES[@]}"; do cp "$CACHE/$archive" "$incoming/" || return; done
  for ((have = 1; have < ${#hosts[@]}; have *= 2)); do
    for ((sender = 0; sender < have && sender + have < ${#hosts[@]}; sender++)); do
      send "${hosts[sender]}" "${hosts[sender + have]}" "$sender" &
    done
    wait
  done
}
send() {
  local line
  printf -v line 'tar -c -C %q . | %s %q %q' "$incoming" "${ssh[*]}" "$2" "tar -x -C $(printf %q "$incoming")"
  if (($3)); then "${ssh[@]}" "$1" "$line"; else bash -c "$line"; fi </dev/null ||
    say "$1 cannot send to $2 by ssh: $2 copies from $CACHE itself."
}

# On every node: unpack what has arrived, under another name until it is complete.
unpack() {
  local number archive copy="$incoming/copy"
  is_ready || [ ! -d "$incoming" ] && return
  for number in "${!ARCHIVES[@]}"; do
    archive="$incoming/${ARCHIVES[number]}"
    if ! has_sum "$archive" "${SUMS[number]}"; then
      if ! cp "$CACHE/${ARCHIVES[number]}" "$archive" || ! has_sum "$archive" "${SUMS[number]}"; then
        use_shared "${ARCHIVES[number]} did not arrive"
        return
      fi
    fi
    if ! { mkdir -p "$copy/${LAYERS[number]}" && tar -xf "$archive" -C "$copy/${LAYERS[number]}"; }; then
      use_shared "${ARCHIVES[number]} cannot be unpacked in $LOCAL"
      return
    fi
    rm "$archive"
  done
  if ! connect "$copy"; then
    use_shared "the copy in $LOCAL cannot be completed"
    return
  fi
  mv -T "$copy" "$place" 2>/dev/null || is_ready || use_shared "$place cannot be written"
  rm -rf "$incoming"
}
has_sum() { [ -f "$1" ] && [ "$(sha256sum <"$1")" = "$2  -" ]; }

# Tell Python where its library and the other folders of its path are.
connect() {
  local each packages="$1/prefix/$SITE_PACKAGES" back
  mkdir -p "$packages" || return
  if [ -n "$VIRTUAL" ]; then
    mkdir -p "$1/prefix/bin" && ln -sf "$(located "$PYTHON")" "$1/prefix/bin/python" || return
    printf 'home = %s\ninclude-system-site-packages = %s\n' "$(dirname "$(located "$PYTHON")")" "$SYSTEM_SITES" \
      >"$1/prefix/pyvenv.cfg" || return
  fi
  if [ -n "$LIBRARY" ]; then # in a folder of its own: others of its folder are not for the programs that ranks start
    mkdir -p "$1/library" && ln -sf "$place/$LIBRARY" "$1/library/" || return
  fi
  back="..$(sed 's|[^/][^/]*|..|g' <<<"/$SITE_PACKAGES")"
  for each in "${AFTER[@]}"; do echo "$back/$each"; done >"$packages/zz_tutti_environment.pth" || return
  [ -z "$KEEP" ] || : >"$1/keep"
  printf '%s %s\n' "$DIGEST" "$(find "$1" -type f -not -path '*/__pycache__/*' | wc -l)" >"$1.complete" && mv "$1.complete" "$1/complete"
}
located() { case $1 in /*) echo "$1" ;; *) echo "$place/$1" ;; esac; }

# On every rank: start Python from the copy, which stays while a rank holds its lock, or from the shared environment.
run() {
  local each held path="$PWD" # the number of the lock is one that the launcher does not use
  if [ -O "$place" ] && { exec {held}<"$place"; } 2>/dev/null && flock -s -w 60 "$held" && is_ready; then
    [ -z "$WORKING_COPY" ] || path="$place/$WORKING_COPY"
    for each in "${BEFORE[@]}"; do path+=":$place/$each"; done
    export PYTHONPATH="$path" PYTHONNOUSERSITE=1 TUTTI_STAGED_ENVIRONMENT="$DIGEST $place"
    if [ -n "$VIRTUAL" ]; then each=prefix/bin/python; else each=$PYTHON; fi
    export PATH="$place/${each%/*}:$PATH"
    [ -z "$LIBRARY" ] || export LD_LIBRARY_PATH="$place/library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    exec "$place/$each" -P "$@"
  fi
  export TUTTI_STAGED_ENVIRONMENT="$DIGEST"
  exec "$SHARED_PYTHON" "$@"
}

# On every node, at the end of a job that is not requeued.
remove() {
  rm -rf "$incoming"
  [ -n "$KEEP" ] || drop "$place"
}
drop() {
  (
    [ -O "$1" ] || exit
    exec {held}<"$1"
    flock -n "$held" || exit # another job uses it
    rm -rf "$1/complete" "$1"
  )
}

case $1 in
  run) shift && run "$@" ;;
  *)
    "$1"
    exit 0 # launchers of MPI end all processes if one fails
    ;;
esac
