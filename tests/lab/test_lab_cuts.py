"""Cuts: in one direction, unseen by both ends, and mended."""

import socket

from tests.lab.inside import inside


def test_a_cut_is_of_one_direction_and_can_be_mended(lab):
    def datagrams():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind(("", 4711))
        opened.settimeout(0.2)
        return opened

    hosts = [inside(pid, datagrams) for pid in lab.host_pids()]

    def arrives(sender, receiver):
        hosts[sender].sendto(b"here", (lab.addresses[receiver], 4711))
        try:
            return hosts[receiver].recv(100) == b"here"
        except TimeoutError:
            return False

    try:
        assert (arrives(0, 1), arrives(1, 0)) == (True, True)
        lab.cut(0, 1)
        assert (arrives(0, 1), arrives(1, 0)) == (False, True)
        lab.mend(0, 1)
        assert (arrives(0, 1), arrives(1, 0)) == (True, True)
    finally:
        for opened in hosts:
            opened.close()
