"""Cuts: in one direction, unseen by both ends, and mended."""

import socket

import pytest

from tests.tools.lab.inside import inside
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.network import SECOND_INTERFACE, second_address_of


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


def test_a_cut_is_of_both_networks_and_each_interface_is_counted(namespaces):
    with Lab(LabSpec(hosts=2, rate_mbit=100, second_network=True)) as lab:

        def datagrams():
            opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            opened.bind(("", 4711))
            opened.settimeout(0.2)
            return opened

        sender, receiver = (inside(pid, datagrams) for pid in lab.host_pids())
        with sender, receiver:
            before = lab.interface_bytes()
            sender.sendto(bytes(1000), (second_address_of(1), 4711))
            assert len(receiver.recv(2000)) == 1000
            grown = [
                {name: now[name] - then[name] for name in now if now[name] > then[name]}
                for then, now in zip(before, lab.interface_bytes(), strict=True)
            ]
            assert [list(one) for one in grown] == [[SECOND_INTERFACE]] * 2
            assert all(one[SECOND_INTERFACE] > 1000 for one in grown)
            for address in (lab.addresses[1], second_address_of(1)):
                lab.cut(0, 1)
                sender.sendto(b"here", (address, 4711))
                with pytest.raises(TimeoutError):
                    receiver.recv(100)
                lab.mend(0, 1)
                sender.sendto(b"here", (address, 4711))
                assert receiver.recv(100) == b"here"
