"""Word lists that several generators share."""

from __future__ import annotations

from typing import Final


def words(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


FIRST_NAMES: Final = words(
    """Ada Ahmed Aiko Alan Amara Anders Anita Anton Beatriz Bilal Bruno Carla Carlos Chen Chloe Clara Daniel Dara
    David Diego Dina Elena Elif Emil Emma Erik Eva Fatima Felix Finn Frank Gabriel Giulia Grace Hana Hannah Hugo Ibrahim
    Ines Ingrid Isaac Ivan Jana Jonas Julia Kamal Karin Kenji Laila Laura Leo Lina Lucas Luis Maria Marta Mateo Maya
    Mei Mila Mona Nadia Nils Noah Nora Olga Omar Oscar Paula Pedro Petra Priya Rafael Raj Rosa Ruth Samir Sara Simon
    Sofia Stefan Tara Theo Tomas Vera Viktor Wanda Yara Yusuf Zoe"""
)

LAST_NAMES: Final = words(
    """Adams Almeida Andersen Baker Barros Bauer Becker Bianchi Bosch Brandt Carter Castro Chen Clarke Costa Cruz Dahl
    Diaz Dubois Eriksen Evans Farouk Fischer Fontana Garcia Gomez Gruber Haddad Hansen Hoffmann Horvat Hughes Ito Jensen
    Kaya Keller Khan Kim Klein Kovacs Kumar Lambert Larsen Lee Lindgren Lopez Mancini Martin Meyer Mori Moreau Mueller
    Nakamura Nguyen Novak Okafor Olsen Ortiz Park Patel Pereira Popescu Reyes Ricci Rossi Roux Santos Sato Schmidt
    Silva Singh Smith Sousa Stone Suzuki Tanaka Torres Turner Vargas Vogel Walker Weber White Wong Young Zhang"""
)

TOWNS: Final = words(
    """Aachen Bergen Bilbao Bologna Bordeaux Brighton Bruges Cardiff Cork Dresden Dundee Faro Galway Geneva Genoa Ghent
    Graz Haarlem Hamburg Krakow Leeds Leipzig Lille Linz Lucerne Lyon Malaga Malmo Mannheim Nantes Odense Oslo Padua
    Palermo Porto Prague Riga Rouen Salzburg Seville Split Tallinn Tampere Toledo Turin Utrecht Valencia Verona
    Vilnius Zagreb Zurich"""
)
