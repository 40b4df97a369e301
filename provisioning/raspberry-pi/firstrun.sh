#!/bin/sh
# Written by edgefl provision; the join token is not in here.
# Run once by systemd (systemd.run= in cmdline.txt) before there is a network (Raspberry Pi OS Bookworm); the board
# reboots afterwards. It only keeps what edgefl/firstboot.sh keeps.
set +e

profiles=/etc/NetworkManager/system-connections
sys_mods=/usr/lib/raspberrypi-sys-mods/imager_custom
hostname=@HOSTNAME@
user=@USER@
ssh_key=@SSH_KEY@
ssid=@SSID@
ssid_bytes=@SSID_BYTES@
psk=@PSK@
country=@COUNTRY@
hidden=@HIDDEN@
interface=@INTERFACE@
addresses=@ADDRESSES@

"$sys_mods" set_hostname "$hostname"
if [ -n "$user" ]; then
    # No password: the account is entered with the key, or not at all.
    /usr/lib/userconf-pi/userconf "$user" '*'
fi
if [ -n "$ssh_key" ]; then
    "$sys_mods" enable_ssh -k "$ssh_key"
fi
if [ -n "$ssid" ]; then
    # It also sets the country and with it switches the radio on; its profile asks by DHCP.
    "$sys_mods" set_wlan ${hidden:+-h} "$ssid" "$psk" "$country"
    rm -f "$profiles/edgefl-wifi.nmconnection"
fi
if [ -n "$addresses" ]; then
    kind=ethernet
    if [ -n "$ssid" ]; then
        kind=wifi
        rm -f "$profiles/preconfigured.nmconnection"
    fi
    (
        umask 077
        {
            printf '[connection]\nid=edgefl-%s\ntype=%s\n' "$kind" "$kind"
            if [ -z "$ssid" ]; then
                printf 'interface-name=%s\n' "$interface"
            else
                printf '[wifi]\nmode=infrastructure\nssid=%s\nhidden=%s\n' "$ssid_bytes" "${hidden:-false}"
                [ -z "$psk" ] || printf '[wifi-security]\nkey-mgmt=wpa-psk\npsk=%s\n' "$psk"
            fi
            printf '%s\n' "$addresses"
        } >"$profiles/edgefl-$kind.nmconnection"
    )
fi
sh /boot/firmware/edgefl/firstboot.sh --no-start
sed -i 's| systemd\.[^ ]*||g' /boot/firmware/cmdline.txt
rm -f /boot/firmware/firstrun.sh
exit 0
