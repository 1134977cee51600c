#!/bin/sh
# Installs what the tests on nodes use: SLURM, munge, faketime and sshd as Debian's packages, and Ray (80 MB to download, 320 MB
# on disk) in an environment of its own inside VENV. What cannot be installed is named here in a line, and the tests that
# need it skip with another. Starts no service.
#
#   tests/nodes/install.sh VENV
set -u
PATH=$PATH:/usr/sbin:/sbin
venv=$1
notes=$(mktemp)
no_services=/usr/sbin/policy-rc.d
made=
trap 'rm -f "$notes"; [ -z "$made" ] || rm -f "$no_services"' EXIT
trap 'exit 1' INT TERM

left_out() {
  echo "tools    $1: $2"
}

missing=
for pair in ip:iproute2 unshare:util-linux slurmctld:slurm-wlm munged:munge faketime:faketime sshd:openssh-server; do
  command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done
if [ -z "$missing" ]; then
  :
elif ! command -v apt-get >/dev/null; then
  left_out "not installed:$missing" "these are Debian's names, and there is no apt-get"
elif [ "$(id -u)" != 0 ]; then
  left_out "not installed:$missing" "only root may"
else
  echo "tools    installing$missing (once)"
  if [ ! -e "$no_services" ]; then # a package must not start a daemon on whoever's machine this is
    printf '#!/bin/sh\nexit 101\n' >"$no_services" && chmod 755 "$no_services" && made=1
  fi
  export DEBIAN_FRONTEND=noninteractive
  quick="-qq -o Acquire::http::Timeout=20 -o Acquire::Retries=1 -o Dpkg::Use-Pty=0"
  # shellcheck disable=SC2086
  { apt-get $quick update && apt-get $quick install -y --no-install-recommends $missing; } >"$notes" 2>&1 </dev/null ||
    left_out "not installed:$missing" "$(tail -n 1 "$notes")"
fi

if [ ! -e "$venv/ray/.installed" ]; then
  echo "tools    installing ray into $venv/ray (once)"
  {
    "$venv/bin/python" -m venv --clear --without-pip "$venv/ray" &&
      "$venv/bin/python" -c 'import sys, sysconfig; print(f"import site; site.addsitedir({sysconfig.get_path(sys.argv[1])!r})")' \
        purelib >"$("$venv/ray/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shardwise_environment.pth" &&
      "$venv/bin/python" -m pip --disable-pip-version-check --quiet --python "$venv/ray/bin/python" install 'ray[default]>=2.40' &&
      touch "$venv/ray/.installed"
  } >"$notes" 2>&1 || left_out "not installed: ray" "$(tail -n 1 "$notes")"
fi
exit 0
