"""Write lighthouse.pdf from lighthouse.txt (needs `pip install fpdf2`, for development only).

Form feeds in the text separate the pages. The cover page is labelled "i", the others "1" to "7".
"""

from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF
from fpdf.enums import PageLabelStyle

HERE = Path(__file__).parent


def main() -> None:
    pdf = FPDF(format="A4")
    pdf.set_title("Skarholm Light: Operations Manual")
    pdf.set_creation_date(datetime(2024, 1, 1, tzinfo=UTC))  # the same bytes from every run
    pdf.set_margin(22)
    pdf.set_auto_page_break(False)
    for number, page in enumerate((HERE / "lighthouse.txt").read_text(encoding="utf-8").split("\f")):
        title, _, body = page.partition("\n\n")
        pdf.add_page(
            label_style=PageLabelStyle.NUMBER if number else PageLabelStyle.LOWER_ROMAN,
            label_start=number or 1,
        )
        pdf.set_font("Helvetica", "B", 15)
        pdf.multi_cell(0, 8, title, align="L", new_x="LMARGIN", new_y="NEXT")
        pdf.ln(3)
        pdf.set_font("Helvetica", size=10.5)
        pdf.multi_cell(0, 5.2, body.strip(), align="L")
    pdf.output(str(HERE / "lighthouse.pdf"))


if __name__ == "__main__":
    main()
