#!/bin/sh
# Run once by systemd (systemd.run= in cmdline.txt) before there is a network (Raspberry Pi OS Bookworm); the board
# reboots afterwards. It only keeps what edgefl/firstboot.sh keeps.
set +e

sys_mods=/usr/lib/raspberrypi-sys-mods/imager_custom
hostname=@HOSTNAME@
user=@USER@
ssh_key=@SSH_KEY@
ssid=@SSID@
psk=@PSK@
country=@COUNTRY@
hidden=@HIDDEN@
address=@ADDRESS@
gateway=@GATEWAY@
dns=@DNS@

"$sys_mods" set_hostname "$hostname"
if [ -n "$user" ]; then
    # No password: the account is entered with the key, or not at all.
    /usr/lib/userconf-pi/userconf "$user" '*'
fi
if [ -n "$ssh_key" ]; then
    "$sys_mods" enable_ssh -k "$ssh_key"
fi
if [ -n "$ssid" ]; then
    "$sys_mods" set_wlan ${hidden:+-h} "$ssid" "$psk" "$country"
fi
if [ -n "$address" ]; then
    (
        umask 077
        printf '[connection]\nid=edgefl-ethernet\ntype=ethernet\n[ipv4]\nmethod=manual\naddress1=%s,%s\ndns=%s;\n' \
            "$address" "$gateway" "$dns" >/etc/NetworkManager/system-connections/edgefl-ethernet.nmconnection
    )
fi
sh /boot/firmware/edgefl/firstboot.sh --no-start
sed -i 's| systemd\.[^ ]*||g' /boot/firmware/cmdline.txt
rm -f /boot/firmware/firstrun.sh
exit 0
