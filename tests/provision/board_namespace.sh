#!/bin/sh
# A board: sshd with mounts and processes of its own, so that what is installed there is nowhere else on this machine.
# Run by: unshare --mount --pid --fork --mount-proc --kill-child sh board_namespace.sh FOLDER
set -eu
folder=$1
mkdir -p "$folder/upper" "$folder/work"
for place in etc opt var usr/local; do
    name=$(echo "$place" | tr / -)
    mkdir -p "$folder/upper/$name" "$folder/work/$name"
    mount -t overlay overlay -o "lowerdir=/$place,upperdir=$folder/upper/$name,workdir=$folder/work/$name" "/$place"
done
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /srv
mount -t tmpfs tmpfs /home
# A shell that sshd starts reads these: the board's PATH is that of its sshd.
for file in .bashrc .profile .bash_profile; do
    [ ! -e "/root/$file" ] || mount --bind /dev/null "/root/$file"
done
mkdir -p /run/sshd /srv/data
chmod 755 /run/sshd
cp "$folder"/data/* /srv/data/
install -m 755 "$folder"/programs/* /usr/local/bin/
useradd --create-home --password '*' pi
install -m 644 "$folder/authorized" /etc/ssh/authorized
exec /usr/sbin/sshd -D -e -f "$folder/sshd_config"
